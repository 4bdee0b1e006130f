// What the plans of both passes tell a graph alike. Private to them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/cuda/request_arrays.h"
#include "engine/cuda/sdpa_graph.h"

namespace attnd {

// Points to the arrays of a request, which lie at `block` on the device as `layout` says, from slot
// `first` on.
void PointToArrays(const std::byte* block, const RequestArrayLayout& layout, int64_t first,
                   SdpaPointers& pointers);

}  // namespace attnd
