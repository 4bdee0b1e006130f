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

// Outputs of one forward call.
struct ForwardResult {
  std::vector<std::byte> out, lse;
};

// The request of a case in an arrangement, with the case's mask and numbers in its spec.
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

// Which (arrangement, case) cells a backend ran, and what it refused.
struct Tally {
  std::map<std::string, int> ran;      // By arrangement.
  std::map<std::string, int> refused;  // By reason.
};
Tally& TallyOf(const std::string& backend);

// Runs all cases of a group in one arrangement; GoogleTest failures say what is wrong.
void RunConformance(const BackendUnderTest& backend, AttentionBackend& instance,
                    const Arrangement& arrangement, const std::string& group);

}  // namespace attnd::testing
