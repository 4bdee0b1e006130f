// A bar on standard error while a request travels.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <thread>

namespace attnd::cli {

// "[=====>    ]  55%  12.0 MiB of 24.0 MiB", and at the end "waiting for the answer".
std::string ProgressLine(int64_t sent, int64_t total);

// Redraws from its own thread until it is destroyed, which erases the bar.
class ProgressBar {
 public:
  // `sent` is called from that thread.
  ProgressBar(std::function<int64_t()> sent, int64_t total);

 private:
  std::jthread drawer_;
};

}  // namespace attnd::cli
