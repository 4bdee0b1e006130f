// The process's life: listeners up, engine ready, serving, draining, down.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/config.h"

namespace attnd {

class Server {
 public:
  // Listens on every address of the config, and serves. FAILED_PRECONDITION with the address where
  // one cannot be listened on (a port in use, say); UNAVAILABLE where the config asks for a GPU
  // that cannot be used.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const Config& config);

  virtual ~Server() = default;

  // What computes first, and why it and no other, in one line.
  virtual std::string backend() const = 0;
  virtual std::string why_backend() const = 0;

  // The addresses as bound: port 0 replaced by the port that the system chose.
  virtual std::vector<std::string> addresses() const = 0;

  // Gives back memory of what has expired. To be called every few seconds.
  virtual void Tidy() = 0;

  // Says NOT_SERVING, goes on for the config's drain delay, refuses new work, finishes what is
  // queued within the drain timeout, and stops. Blocks.
  virtual void Drain() = 0;
};

}  // namespace attnd
