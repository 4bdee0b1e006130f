// The elements of a problem's tensors: random where a sequence has them, NaN where nobody does.
#pragma once

#include <vector>

#include "client/cli/tensor_slots.h"
#include "tests/bench/support_problem.h"

namespace attnd::support {

// Q, K, V and what else the request names, by slot. `views` are those of its plan; null: all
// elements are random.
cli::CallTensors MakeTensors(const Problem& problem, const v1::ResolvedViews* views);

// A random gradient of O, of the type that the problem's O has.
cli::HostTensor MakeOutGradient(const Problem& problem, const v1::ResolvedViews* views);

// What `problem`'s O is stored in.
v1::DataType OutType(const Problem& problem);

// For each element of O, or of the gradient of `slot`: whether a sequence has it. Empty for a bias
// and a softmax offset.
std::vector<bool> OwnedOut(const Problem& problem, const v1::ResolvedViews& views);
std::vector<bool> OwnedGradient(const Problem& problem, const v1::ResolvedViews& views, int slot);

// Overwrites what nobody owns with NaN.
void PoisonOut(const Problem& problem, const v1::ResolvedViews& views, cli::HostTensor* out);
void PoisonLse(const Problem& problem, cli::HostTensor* lse);

}  // namespace attnd::support
