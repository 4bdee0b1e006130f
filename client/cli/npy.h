// NumPy's .npy files, as far as tensors of the contract need them: format versions 1.0 and 2.0, C
// order, little-endian. Every number of the header is checked before it is believed.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cli/host_tensor.h"

namespace attnd::cli {

// FLOAT32 is '<f4', FLOAT16 '<f2', INT32 '<i4'. NumPy has no bfloat16: '<u2', '|V2' and '<V2' (what
// ml_dtypes arrays become) hold its bits, and are read only where `dtype` is BFLOAT16. `dtype`
// unspecified: what the file says. Errors name the file: NOT_FOUND where it cannot be opened,
// INVALID_ARGUMENT where it is no such file, does not hold `dtype`, or is shorter or longer than
// its header says.
absl::StatusOr<HostTensor> ReadNpy(const std::string& path, v1::DataType dtype);

// Writes (or replaces) `path`. BFLOAT16 goes out as its bits in '<u2'. `data` has the bytes of
// dtype and shape.
absl::Status WriteNpy(const std::string& path, v1::DataType dtype,
                      const std::vector<int64_t>& shape, const std::string& data);

}  // namespace attnd::cli
