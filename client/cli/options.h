// What the command line says, before any of it is looked up or checked.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace attnd::cli {

// Exit codes.
inline constexpr int kExitOk = 0;
inline constexpr int kExitRefused =
    1;  // The service refused, cannot be reached, or a check failed.
inline constexpr int kExitUsage = 2;

// The fields of v1::QkvBuffers, in order; the number of a field is its index here + 1.
inline constexpr std::array<const char*, 5> kInputNames = {"qkv", "q", "kv", "k", "v"};

// Options of `plan`, `forward` and `backward`. Texts are what was typed; empty means absent.
struct RequestOptions {
  std::string layout;
  std::string dtype;
  std::string out_dtype;
  std::optional<int64_t> batch;
  std::optional<int64_t> seqlen_q;
  std::optional<int64_t> seqlen_kv;
  std::optional<int64_t> heads;
  std::optional<int64_t> kv_heads;
  std::optional<int64_t> head_dim;
  std::optional<int64_t> head_dim_v;
  std::optional<int64_t> page_size;
  std::string cu_seqlens_q;
  std::string cu_seqlens_kv;
  std::string cu_seqlens_q_padded;
  std::string cu_seqlens_kv_padded;
  std::string causal;
  std::string window;  // "L,R"
  std::string window_alignment;
  std::optional<double> scale;
  std::optional<double> softcap;
  std::string bias_kind;
  std::string bias_file;
  std::string bias_shape;  // "1hss"
  std::string softmax;
  std::string softmax_offset_file;
  std::optional<double> dropout;
  int64_t dropout_seed = 0;
  int64_t dropout_offset = 0;
  std::string alibi;  // "HEAD_OFFSET,TOTAL_HEADS"
  bool deterministic = false;
  bool batch_invariant = false;
  std::vector<std::string> fp8_scales;  // "scale_o=16"
  bool lse = false;
  bool backward = false;            // plan
  std::vector<std::string> views;   // "q:BUFFER:BYTE_OFFSET:S0,S1,S2,S3"
  std::vector<std::string> shapes;  // "BUFFER:D0,D1,..."
  std::array<std::string, kInputNames.size()> input_files;
  std::string page_table_k_file;
  std::string page_table_v_file;
  std::string saved_out_file;  // backward: what forward returned, ...
  std::string saved_lse_file;
  std::string d_out_file;  // ... and the gradient of O.
  bool random = false;
  uint64_t seed = 0;
};

enum class Command { kHealth, kCapabilities, kPlan, kForward, kBackward };

struct Options {
  Command command = Command::kHealth;
  std::string address = "127.0.0.1:50051";
  double timeout_seconds = 60;
  bool json = false;
  // health
  std::string service;
  double wait_seconds = 0;
  // plan, forward, backward
  RequestOptions request;
  // forward
  std::string out_file;
  std::string lse_out_file;
  // backward
  std::optional<double> retain_seconds;
  std::string grads_prefix;
  // forward, backward
  bool check = false;
  bool progress = false;
};

// Fills `options`. Returns the exit code where the program is done with that: after --help and
// --version, and after a usage error, which has been printed to standard error.
std::optional<int> ParseCommandLine(int argc, const char* const* argv, Options* options);

}  // namespace attnd::cli
