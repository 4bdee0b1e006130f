#include "client/cli/options.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>
#include <utility>

namespace attnd::cli {
namespace {

constexpr char kDescription[] =
    "Command line client of attnd.\n"
    "Exit codes: 0; 1 the service refused or cannot be reached, or a check failed; 2 usage.";

constexpr char kForwardExample[] =
    "Example: attnctl forward --layout BS3HD --batch 2 --seqlen-q 128 --heads 4 --head-dim 64\n"
    "           --causal top-left --random --check";

constexpr char kBackwardExample[] =
    "Without --out and --lse, forward is computed first, by the same server.\n"
    "Example: attnctl backward --layout BS3HD --batch 2 --seqlen-q 128 --heads 4 --head-dim 64\n"
    "           --causal top-left --random --check";

// Named by the contract and not built yet.
constexpr const char* kNotBuilt[] = {"stats", "warm", "put", "get"};

void AddGlobalOptions(CLI::App& app, Options* o) {
  app.set_version_flag("--version", "attnctl " ATTND_VERSION);
  app.add_option("--address", o->address, "Server: HOST:PORT or unix:PATH")
      ->envname("ATTND_ADDRESS")
      ->capture_default_str();
  app.add_option("--timeout", o->timeout_seconds, "Seconds until a call is given up")
      ->check(CLI::Range(0.001, 1e6))
      ->capture_default_str();
  app.add_flag("--json", o->json, "Print one JSON document");
}

void AddSizeOptions(CLI::App& sub, RequestOptions* r) {
  const char* group = "Sizes (absent: taken from the shapes)";
  sub.add_option("--batch", r->batch, "Sequences")->group(group);
  sub.add_option("--seqlen-q", r->seqlen_q, "Query rows: the axis, or the longest")->group(group);
  sub.add_option("--seqlen-kv", r->seqlen_kv, "Key rows: the axis, or the longest")->group(group);
  sub.add_option("--heads", r->heads, "Query heads")->group(group);
  sub.add_option("--kv-heads", r->kv_heads, "KV heads")->group(group);
  sub.add_option("--head-dim", r->head_dim, "Head dimension of Q and K")->group(group);
  sub.add_option("--head-dim-v", r->head_dim_v, "Head dimension of V")->group(group);
  sub.add_option("--page-size", r->page_size, "Rows of a page")->group(group);
}

void AddSequenceOptions(CLI::App& sub, RequestOptions* r) {
  const char* group = "Sequences (lists such as 0,3,7)";
  sub.add_option("--cu-seqlens-q", r->cu_seqlens_q, "Cumulative query lengths")->group(group);
  sub.add_option("--cu-seqlens-kv", r->cu_seqlens_kv, "Cumulative key lengths")->group(group);
  sub.add_option("--cu-seqlens-q-padded", r->cu_seqlens_q_padded, "THD rows of the queries' starts")
      ->group(group);
  sub.add_option("--cu-seqlens-kv-padded", r->cu_seqlens_kv_padded, "THD rows of the keys' starts")
      ->group(group);
  sub.add_option("--page-table-k", r->page_table_k_file, ".npy, int32 [b, pages]")->group(group);
  sub.add_option("--page-table-v", r->page_table_v_file, ".npy, int32 [b, pages]")->group(group);
}

void AddFeatureOptions(CLI::App& sub, RequestOptions* r) {
  const char* group = "Bias, softmax and dropout";
  sub.add_option("--bias-kind", r->bias_kind, "none, pre-scale, post-scale or alibi")->group(group);
  sub.add_option("--bias", r->bias_file, ".npy file, [1|b, 1|h, 1|s_q, s_kv]")->group(group);
  sub.add_option("--bias-shape", r->bias_shape,
                 "Of a bias without a file: 11ss, 1hss (default), b1ss, bhss, 111s, ...")
      ->group(group);
  sub.add_option("--softmax", r->softmax, "vanilla, off-by-one or learnable")->group(group);
  sub.add_option("--softmax-offset", r->softmax_offset_file, ".npy file, float32 [h]")
      ->group(group);
  sub.add_option("--dropout", r->dropout, "Probability that a cell is dropped")->group(group);
  sub.add_option("--dropout-seed", r->dropout_seed, "One seed and offset gives one mask")
      ->group(group);
  sub.add_option("--dropout-offset", r->dropout_offset, "(default of both: 0)")->group(group);
  sub.add_option("--alibi", r->alibi,
                 "FIRST,TOTAL: the first of these heads, and heads of the model")
      ->group(group);
  sub.add_flag("--deterministic", r->deterministic, "The same bits in every run")->group(group);
  sub.add_flag("--batch-invariant", r->batch_invariant, "The same bits in every batch")
      ->group(group);
}

void AddRequestOptions(CLI::App& sub, RequestOptions* r) {
  sub.add_option("--layout", r->layout, "BS3HD, THD_T2HD, ... (see `capabilities`), or STRIDED")
      ->required();
  sub.add_option("--dtype", r->dtype,
                 "float32, float16, bfloat16, float8_e4m3, float8_e5m2 (default: the files', "
                 "float32)");
  sub.add_option("--out-dtype", r->out_dtype, "dtype of O, if another: float32");
  sub.add_option("--causal", r->causal, "none, top-left or bottom-right");
  sub.add_option("--window", r->window, "LEFT,RIGHT keys of the diagonal; -1 is unlimited");
  sub.add_option("--window-alignment", r->window_alignment, "top-left or bottom-right");
  sub.add_option("--scale", r->scale, "Factor of QK^T (default 1/sqrt(head dim))");
  sub.add_option("--softcap", r->softcap, "Logit soft cap");
  sub.add_option("--fp8-scale", r->fp8_scales,
                 "FP8: NAME=VALUE of a field of Fp8Scales (default of all: 1); may be repeated");
  sub.add_option("--view", r->views,
                 "STRIDED: q|k|v:BUFFER:BYTE_OFFSET:STRIDES[:GROUP_STRIDE] (elements); three times")
      ->expected(1, 3);
  AddSizeOptions(sub, r);
  AddSequenceOptions(sub, r);
  AddFeatureOptions(sub, r);
  const char* group = "Buffers (of those that the layout names)";
  for (size_t i = 0; i < kInputNames.size(); ++i) {
    sub.add_option(std::string("--") + kInputNames[i], r->input_files[i], ".npy file")
        ->group(group);
  }
  sub.add_option("--shape", r->shapes, "BUFFER:D0,D1,... where no file says it and sizes do not")
      ->expected(1, static_cast<int>(kInputNames.size()))
      ->group(group);
}

// What forward and backward have in common.
void AddCallOptions(CLI::App& sub, Options* o) {
  AddRequestOptions(sub, &o->request);
  sub.add_flag("--random", o->request.random, "Send random tensors of unit variance");
  sub.add_option("--seed", o->request.seed, "Seed of --random")->capture_default_str();
  sub.add_flag("--progress", o->progress, "Show progress even if small or not on a terminal");
}

void AddForwardOptions(CLI::App& sub, Options* o) {
  AddCallOptions(sub, o);
  sub.add_flag("--lse", o->request.lse, "Return the LSE");
  sub.add_option("--out", o->out_file, "Write O to this .npy file (bfloat16 as its bits, uint16)");
  sub.add_option("--lse-out", o->lse_out_file, "Write the LSE to this .npy file; implies --lse");
  sub.add_flag("--check", o->check,
               "Compare with the reference loop in this program; implies --lse");
  sub.footer(kForwardExample);
}

void AddBackwardOptions(CLI::App& sub, Options* o) {
  AddCallOptions(sub, o);
  CLI::Option* out =
      sub.add_option("--out", o->request.saved_out_file, ".npy file, O as forward wrote it");
  CLI::Option* lse =
      sub.add_option("--lse", o->request.saved_lse_file, ".npy file, the LSE as forward wrote it");
  sub.add_option("--retain", o->retain_seconds,
                 "Let the server keep forward's tensors for so many seconds, and send d_out alone")
      ->check(CLI::Range(0.001, 1e6))
      ->excludes(out)
      ->excludes(lse);
  sub.add_option("--d-out", o->request.d_out_file, ".npy file, the gradient of O");
  sub.add_option("--grads-out", o->grads_prefix,
                 "Write the gradients to PREFIX.qkv.npy, PREFIX.q.npy, PREFIX.bias.npy, ...")
      ->option_text("PREFIX");
  sub.add_flag("--check", o->check, "Compare with the reference loop in this program");
  sub.footer(kBackwardExample);
}

void AddPlanOptions(CLI::App& sub, RequestOptions* r) {
  AddRequestOptions(sub, r);
  sub.add_flag("--lse", r->lse, "Return the LSE");
  sub.add_flag("--backward", r->backward, "Plan backward instead of forward");
}

void AddSubcommands(CLI::App& app, Options* o) {
  CLI::App* health = app.add_subcommand("health", "Is the server serving?");
  health->add_option("--service", o->service, "Service to ask about (default: all)");
  health->add_option("--wait", o->wait_seconds, "Seconds to wait until it serves")
      ->check(CLI::Range(0.0, 86400.0));
  health->callback([o] { o->command = Command::kHealth; });

  app.add_subcommand("capabilities", "Versions, backends, layouts, limits")->callback([o] {
    o->command = Command::kCapabilities;
  });

  CLI::App* plan = app.add_subcommand("plan",
                                      "What would forward (or backward) do? Resolved views and "
                                      "memory; 1 where it is not supported");
  AddPlanOptions(*plan, &o->request);
  plan->callback([o] { o->command = Command::kPlan; });

  CLI::App* forward = app.add_subcommand("forward", "Attention of .npy files or random tensors");
  AddForwardOptions(*forward, o);
  forward->callback([o] { o->command = Command::kForward; });

  CLI::App* backward = app.add_subcommand("backward", "Gradients of .npy files or random tensors");
  AddBackwardOptions(*backward, o);
  backward->callback([o] { o->command = Command::kBackward; });

  for (const char* name : kNotBuilt) {
    CLI::App* sub = app.add_subcommand(name, "Not built yet")->allow_extras()->fallthrough(false);
    sub->callback([name] { throw CLI::ValidationError(std::string(name) + " is not built yet"); });
  }
}

}  // namespace

std::optional<int> ParseCommandLine(int argc, const char* const* argv, Options* options) {
  CLI::App app(kDescription, "attnctl");
  app.require_subcommand(1);
  app.fallthrough();
  AddGlobalOptions(app, options);
  AddSubcommands(app, options);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& done) {
    return app.exit(done);
  } catch (const CLI::ParseError& error) {
    std::fprintf(stderr, "attnctl: %s (see attnctl --help)\n", error.what());
    return kExitUsage;
  }
  RequestOptions& request = options->request;
  // Backward needs the LSE of the forward that it may have to ask for.
  request.lse = request.lse || options->check || !options->lse_out_file.empty() ||
                options->command == Command::kBackward;
  return std::nullopt;
}

}  // namespace attnd::cli
