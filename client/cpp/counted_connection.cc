#include "client/cpp/counted_connection.h"

#include <fcntl.h>
#include <grpcpp/create_channel_posix.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "client/cpp/client.h"

namespace attnd::client {
namespace {

constexpr size_t kBufferBytes = size_t{1} << 18;

// Bytes on their way from one socket to the other. Reads only when it is empty, so that whichever
// side is slow holds the other back, and nothing is left in it when a side closes.
class Pipe {
 public:
  bool empty() const { return begin_ == end_; }

  // Both return false where the connection is over.
  bool Fill(int from) {
    const ssize_t n = recv(from, buffer_.data(), buffer_.size(), 0);
    if (n < 0) return WouldBlock();
    begin_ = 0;
    end_ = static_cast<size_t>(n);
    return n > 0;
  }

  bool Drain(int to, std::atomic<int64_t>* count) {
    const ssize_t n = send(to, buffer_.data() + begin_, end_ - begin_, MSG_NOSIGNAL);
    if (n < 0) return WouldBlock();
    begin_ += static_cast<size_t>(n);
    if (count != nullptr) count->fetch_add(n, std::memory_order_relaxed);
    return true;
  }

 private:
  static bool WouldBlock() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

  std::vector<char> buffer_ = std::vector<char>(kBufferBytes);
  size_t begin_ = 0;
  size_t end_ = 0;
};

// A connected, non-blocking socket; -1 where there is none.
int ConnectTo(const sockaddr* address, socklen_t length, std::chrono::milliseconds timeout) {
  const int fd = socket(address->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  int error = 0;
  if (connect(fd, address, length) != 0) {
    error = errno;
    pollfd writable{.fd = fd, .events = POLLOUT, .revents = 0};
    if (error == EINPROGRESS && poll(&writable, 1, static_cast<int>(timeout.count())) == 1) {
      socklen_t size = sizeof(error);
      getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
    }
  }
  if (error == 0) return fd;
  close(fd);
  return -1;
}

int ConnectUnix(const std::string& path, std::chrono::milliseconds timeout) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) return -1;
  std::memcpy(address.sun_path, path.data(), path.size());
  return ConnectTo(reinterpret_cast<const sockaddr*>(&address), sizeof(address), timeout);
}

int ConnectTcp(const std::string& address, std::chrono::milliseconds timeout) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) return -1;
  std::string host = address.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), address.c_str() + colon + 1, &hints, &found) != 0) return -1;
  int fd = -1;
  for (const addrinfo* info = found; info != nullptr && fd < 0; info = info->ai_next) {
    fd = ConnectTo(info->ai_addr, info->ai_addrlen, timeout);
  }
  freeaddrinfo(found);
  const int on = 1;
  if (fd >= 0) setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  return fd;
}

}  // namespace

std::unique_ptr<CountedConnection> CountedConnection::Connect(const std::string& address,
                                                              std::chrono::milliseconds timeout) {
  const std::string unix_prefix = "unix:";
  const int server = address.rfind(unix_prefix, 0) == 0
                         ? ConnectUnix(address.substr(unix_prefix.size()), timeout)
                         : ConnectTcp(address, timeout);
  if (server < 0) return nullptr;
  int pair[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) != 0) {
    close(server);
    return nullptr;
  }
  std::unique_ptr<CountedConnection> connection(new CountedConnection(server, pair[0]));
  connection->channel_ =
      grpc::CreateCustomInsecureChannelFromFd("localhost", pair[1], MakeChannelArguments());
  connection->carrier_ = std::thread(&CountedConnection::Carry, connection.get());
  return connection;
}

CountedConnection::~CountedConnection() {
  shutdown(local_, SHUT_RDWR);  // Wakes the carrier.
  carrier_.join();
  close(local_);
  close(server_);
}

void CountedConnection::Carry() {
  Pipe up, down;
  bool open = true;
  while (open) {
    const auto events = [](const Pipe& from_here, const Pipe& to_here) {
      return static_cast<short>((from_here.empty() ? POLLIN : 0) | (to_here.empty() ? 0 : POLLOUT));
    };
    pollfd fds[] = {{local_, events(up, down), 0}, {server_, events(down, up), 0}};
    // A side that is waited for in no way must not wake us by having closed.
    for (pollfd& fd : fds) {
      if (fd.events == 0) fd.fd = -1;
    }
    if (poll(fds, 2, -1) < 0) {
      open = errno == EINTR;
      continue;
    }
    const auto ready = [](const pollfd& fd, short event) {
      return (fd.events & event) != 0 && (fd.revents & (event | POLLHUP | POLLERR)) != 0;
    };
    if (ready(fds[1], POLLOUT)) open = up.Drain(server_, &sent_bytes_);
    if (open && ready(fds[0], POLLOUT)) open = down.Drain(local_, nullptr);
    if (open && ready(fds[0], POLLIN) && up.empty()) open = up.Fill(local_);
    if (open && ready(fds[1], POLLIN) && down.empty()) open = down.Fill(server_);
  }
  shutdown(local_, SHUT_RDWR);
  shutdown(server_, SHUT_RDWR);
}

}  // namespace attnd::client
