// The suite that every backend passes: each arrangement of Q, K and V times every golden problem
// that it can hold, against float64 answers.
//
// To put a backend through it, describe it as a BackendUnderTest in Backends() of
// conformance_test.cc.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/backend/attention_backend.h"
#include "tests/conformance/golden.h"
#include "tests/conformance/pack.h"

namespace attnd::testing {

// Groups of the golden cases.
inline constexpr const char* kConformanceGroups[] = {
    "none",   "causal_tl", "causal_br", "window", "head_dim", "softcap", "scale", "tiles",
    "shapes", "bias_pre",  "bias_post", "alibi",  "sinks",    "dropout", "large", "fp8"};

// A backend and the memory that its buffers live in.
struct BackendUnderTest {
  std::string name;
  std::function<std::unique_ptr<AttentionBackend>()> make;
  // 64-byte aligned, of exactly `size` bytes (size > 0); given back by `release`.
  std::function<std::byte*(size_t size)> allocate;
  std::function<void(std::byte* memory)> release;
  // Host to backend and back; done when it returns.
  std::function<void(std::byte* to, const std::byte* from, size_t size)> copy;
  // The calling thread's queue; empty where the backend has none.
  std::function<DeviceQueue&()> queue;
  // True: a problem that the backend refuses is a failure. False: it is listed with its reason.
  bool runs_everything = true;
};

// Memory of a backend under test, filled with 0xFF where nothing is copied in.
class TestBuffer {
 public:
  TestBuffer(const BackendUnderTest& backend, std::span<const std::byte> contents);
  TestBuffer(const BackendUnderTest& backend, size_t size);

  std::byte* get() const { return memory_.get(); }  // Null if it has no bytes.
  std::vector<std::byte> Read() const;

 private:
  const BackendUnderTest* backend_;
  size_t size_;
  std::unique_ptr<std::byte, std::function<void(std::byte*)>> memory_;
};

// Outputs of one forward call. amax is of FP8 alone.
struct ForwardResult {
  std::vector<std::byte> out, lse, amax;
};

// Gradients of one backward call.
struct BackwardResult {
  std::array<std::vector<std::byte>, kNumInputBuffers> grads;
  std::vector<std::byte> d_bias, d_softmax_offset, amax;
};

// A forward request and what a client sends back with it.
struct BackwardRequest {
  PackedRequest forward;
  std::vector<std::byte> out, lse, d_out;  // As the problem's out_desc and lse_desc.
};

// The request of a case in an arrangement, with all that the case says in its spec and bias and
// softmax offset described in its inputs. A bias goes with explicit sizes, since it has their axes.
PackedRequest MakeRequest(const Arrangement& arrangement, const GoldenCase& c,
                          const PackOptions& options = {});

// Runs a plan over the request's buffers with outputs and workspace poisoned.
absl::StatusOr<ForwardResult> RunForward(const BackendUnderTest& backend, AttentionPlan& plan,
                                         const AttentionProblem& problem,
                                         const PackedRequest& request, bool want_lse = true);

// Empty if the outputs are right: within the bounds where a row sees keys, exactly 0 and -inf
// everywhere else. Otherwise a sentence.
std::string Compare(const Arrangement& arrangement, const GoldenCase& c,
                    const AttentionProblem& problem, const ForwardResult& result);

// O and LSE are the golden ones. Rows of all three that belong to nobody are NaN.
BackwardRequest MakeBackwardRequest(const Arrangement& arrangement, const GoldenCase& c,
                                    const AttentionProblem& problem, PackedRequest forward);

// As RunForward and Compare.
absl::StatusOr<BackwardResult> RunBackward(const BackendUnderTest& backend, BackwardPlan& plan,
                                           const AttentionProblem& problem,
                                           const BackwardRequest& request);
std::string CompareGradients(const Arrangement& arrangement, const GoldenCase& c,
                             const AttentionProblem& problem, const BackwardResult& result);

// Compares the reply's amax with consecutive ones of the case's, from number `first` on; each error
// is at most that bound times the value.
std::string CompareAmax(const GoldenCase& c, const std::vector<std::byte>& got, size_t first,
                        std::span<const double> bounds);

// Which (arrangement, case) cells a backend ran, and what it refused.
struct Tally {
  std::map<std::string, int> ran;      // By arrangement.
  std::map<std::string, int> refused;  // By reason.
};
Tally& TallyOf(const std::string& backend);

// Counts a refusal that may be and gives an empty string; otherwise a sentence.
std::string TallyRefusal(const absl::Status& status, bool runs_everything, Tally& tally);

// Sanitizers make everything slower: they see a part of the cases, others of each group.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr size_t kEveryNthCase = 8;
#else
inline constexpr size_t kEveryNthCase = 1;
#endif

// Runs all cases of a group in one arrangement; GoogleTest failures say what is wrong.
void RunConformance(const BackendUnderTest& backend, AttentionBackend& instance,
                    const Arrangement& arrangement, const std::string& group);

// The same for the gradients of those that have them; tallied under BackwardName. Pages are always
// refused, by spec.layout.
void RunBackwardConformance(const BackendUnderTest& backend, AttentionBackend& instance,
                            const Arrangement& arrangement, const std::string& group);
inline std::string BackwardName(const BackendUnderTest& backend) {
  return backend.name + "_backward";
}

}  // namespace attnd::testing
