// What --random makes: tensors of unit variance, and page tables.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "client/cli/request.h"

namespace attnd::cli {

// Independent elements of a normal distribution; `dtype` FLOAT32, FLOAT16 or BFLOAT16.
HostTensor RandomTensor(v1::DataType dtype, std::vector<int64_t> shape, uint64_t seed);

// Gives a paged request that has no page tables the shapes of such as hold its longest sequence;
// their entries come with the pools. Errors are about the command line, here and below.
absl::Status DescribePageTables(v1::ForwardRequest* request);

// Makes every input of the call, the entries of page tables that are described alone, and bias and
// softmax offset where the request describes them and they are not there yet.
absl::Status MakeRandomTensors(uint64_t seed, ForwardCall* call);

}  // namespace attnd::cli
