// A connection whose sent bytes can be watched, for progress on long uploads.
//
// gRPC keeps a message until the whole call has ended and does not say how much of it has left. So
// the channel of this class ends in a socket pair, and a thread carries the bytes between that and
// the server, counting. It costs a copy; use it where somebody watches.
#pragma once

#include <grpcpp/channel.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>

namespace attnd::client {

class CountedConnection {
 public:
  // Connects to host:port or unix:PATH. nullptr where the address is of another form, or nobody
  // answers there within `timeout` (for each address that the host's name has).
  static std::unique_ptr<CountedConnection> Connect(const std::string& address,
                                                    std::chrono::milliseconds timeout);

  // Ends the connection; a call that still runs on the channel fails with UNAVAILABLE.
  ~CountedConnection();

  CountedConnection(const CountedConnection&) = delete;
  CountedConnection& operator=(const CountedConnection&) = delete;

  // Does not connect again once the connection is lost.
  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }

  // Bytes that the server's socket has taken, headers and framing included. Any thread.
  int64_t sent_bytes() const { return sent_bytes_.load(std::memory_order_relaxed); }

 private:
  // Owns both: `server` to the server, `local` to gRPC's end of the pair.
  CountedConnection(int server, int local) : server_(server), local_(local) {}

  // Carries bytes both ways until one side closes.
  void Carry();

  const int server_;
  const int local_;
  std::atomic<int64_t> sent_bytes_{0};
  std::shared_ptr<grpc::Channel> channel_;
  std::thread carrier_;
};

}  // namespace attnd::client
