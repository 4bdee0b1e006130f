// The GPU as a backend under test: its buffers are device memory of exactly their size. Needs a
// device.
#pragma once

#include "tests/conformance/conformance.h"

namespace attnd::testing {

const BackendUnderTest& OnDevice();

}  // namespace attnd::testing
