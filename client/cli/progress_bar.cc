#include "client/cli/progress_bar.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <stop_token>
#include <utility>

#include "client/cli/host_tensor.h"

namespace attnd::cli {
namespace {

constexpr int kBarColumns = 30;
constexpr auto kRedrawInterval = std::chrono::milliseconds(100);
constexpr char kEraseLine[] = "\r\x1b[K";

void Draw(std::stop_token stop, const std::function<int64_t()>& sent, int64_t total) {
  std::mutex mutex;
  std::condition_variable_any stopped;
  std::unique_lock lock(mutex);
  while (!stop.stop_requested()) {
    std::fprintf(stderr, "%s%s", kEraseLine, ProgressLine(sent(), total).c_str());
    std::fflush(stderr);
    stopped.wait_for(lock, stop, kRedrawInterval, [] { return false; });
  }
  std::fputs(kEraseLine, stderr);
  std::fflush(stderr);
}

}  // namespace

std::string ProgressLine(int64_t sent, int64_t total) {
  const double share =
      total > 0 ? std::clamp(static_cast<double>(sent) / static_cast<double>(total), 0.0, 1.0) : 1;
  const int filled = static_cast<int>(share * kBarColumns);
  std::string bar(static_cast<size_t>(filled), '=');
  if (filled < kBarColumns) bar += '>';
  bar.resize(kBarColumns, ' ');
  char percent[16];
  std::snprintf(percent, sizeof(percent), "%3d%%", static_cast<int>(share * 100));
  return "[" + bar + "] " + percent + "  " +
         (share < 1 ? BytesString(sent) + " of " + BytesString(total)
                    : BytesString(total) + " sent, waiting for the answer");
}

ProgressBar::ProgressBar(std::function<int64_t()> sent, int64_t total)
    : drawer_([sent = std::move(sent), total](std::stop_token stop) { Draw(stop, sent, total); }) {}

}  // namespace attnd::cli
