// A .npy file is "\x93NUMPY", version, header length, a Python dict literal, then the elements:
//   {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }
// The parser below reads that one form of literal and nothing else of Python.

#include "client/cli/npy.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace attnd::cli {
namespace {

constexpr char kMagic[] = "\x93NUMPY";
constexpr size_t kMagicBytes = 6;
constexpr uint32_t kMaxHeaderBytes = 1 << 16;

struct Header {
  std::string descr;
  bool fortran_order = false;
  std::vector<int64_t> shape;
};

class HeaderParser {
 public:
  explicit HeaderParser(absl::string_view text) : text_(text) {}

  // nullopt where the text is no dict of exactly the three keys.
  std::optional<Header> Parse() {
    Header header;
    bool has_descr = false, has_order = false, has_shape = false;
    if (!Take('{')) return std::nullopt;
    while (!Take('}')) {
      std::string key;
      if (!TakeString(&key) || !Take(':')) return std::nullopt;
      bool* seen = key == "descr"           ? &has_descr
                   : key == "fortran_order" ? &has_order
                   : key == "shape"         ? &has_shape
                                            : nullptr;
      if (seen == nullptr || *seen) return std::nullopt;
      *seen = true;
      const bool ok = seen == &has_descr   ? TakeString(&header.descr)
                      : seen == &has_order ? TakeBool(&header.fortran_order)
                                           : TakeTuple(&header.shape);
      if (!ok) return std::nullopt;
      if (!Take(',') && !Peek('}')) return std::nullopt;
    }
    SkipSpace();
    if (!text_.empty() || !has_descr || !has_order || !has_shape) return std::nullopt;
    return header;
  }

 private:
  void SkipSpace() { text_ = absl::StripLeadingAsciiWhitespace(text_); }

  bool Peek(char c) {
    SkipSpace();
    return !text_.empty() && text_.front() == c;
  }

  bool Take(char c) {
    if (!Peek(c)) return false;
    text_.remove_prefix(1);
    return true;
  }

  bool TakeString(std::string* value) {
    SkipSpace();
    if (text_.empty() || (text_.front() != '\'' && text_.front() != '"')) return false;
    const size_t end = text_.find(text_.front(), 1);
    if (end == absl::string_view::npos) return false;
    *value = std::string(text_.substr(1, end - 1));
    text_.remove_prefix(end + 1);
    return true;
  }

  bool TakeBool(bool* value) {
    SkipSpace();
    *value = absl::ConsumePrefix(&text_, "True");
    return *value || absl::ConsumePrefix(&text_, "False");
  }

  bool TakeTuple(std::vector<int64_t>* values) {
    if (!Take('(')) return false;
    while (!Take(')')) {
      SkipSpace();
      const size_t end = text_.find_first_of(",)");
      if (end == absl::string_view::npos) return false;
      int64_t value = 0;
      if (!absl::SimpleAtoi(text_.substr(0, end), &value) || value < 0) return false;
      values->push_back(value);
      text_.remove_prefix(end);
      if (!Take(',') && !Peek(')')) return false;
    }
    return true;
  }

  absl::string_view text_;
};

absl::Status Bad(const std::string& path, const std::string& problem) {
  return absl::InvalidArgumentError(absl::StrCat(path, ": ", problem));
}

absl::StatusOr<Header> ReadHeader(const std::string& path, std::istream& file) {
  unsigned char start[kMagicBytes + 2];
  if (!file.read(reinterpret_cast<char*>(start), sizeof(start)) ||
      std::memcmp(start, kMagic, kMagicBytes) != 0) {
    return Bad(path, "is no .npy file (it does not begin with \\x93NUMPY)");
  }
  const int major = start[kMagicBytes];
  if (major != 1 && major != 2) {
    return Bad(path, absl::StrCat("has .npy format version ", major, "; 1 and 2 can be read"));
  }
  unsigned char length[4] = {};
  if (!file.read(reinterpret_cast<char*>(length), major == 1 ? 2 : 4)) {
    return Bad(path, "ends within its header");
  }
  const uint32_t size =
      length[0] | length[1] << 8 | length[2] << 16 | static_cast<uint32_t>(length[3]) << 24;
  if (size > kMaxHeaderBytes) {
    return Bad(path, absl::StrCat("says its header has ", size, " bytes; at most ", kMaxHeaderBytes,
                                  " are read"));
  }
  std::string text(size, '\0');
  if (!file.read(text.data(), static_cast<std::streamsize>(size))) {
    return Bad(path, "ends within its header");
  }
  std::optional<Header> header = HeaderParser(text).Parse();
  if (!header) return Bad(path, "has a header that cannot be read: " + text);
  if (header->fortran_order) {
    return Bad(path, "is in Fortran order; save numpy.ascontiguousarray(x)");
  }
  return *std::move(header);
}

// What the elements are, given what the caller expects.
absl::StatusOr<v1::DataType> ElementType(const std::string& path, const std::string& descr,
                                         v1::DataType expected) {
  v1::DataType stored = v1::DATA_TYPE_UNSPECIFIED;
  if (descr == "<f4") stored = v1::DATA_TYPE_FLOAT32;
  if (descr == "<f2") stored = v1::DATA_TYPE_FLOAT16;
  if (descr == "<i4") stored = v1::DATA_TYPE_INT32;
  if (descr == "<u2" || descr == "|V2" || descr == "<V2") {
    if (expected != v1::DATA_TYPE_BFLOAT16) {
      return Bad(path, absl::StrCat("has elements of type '", descr,
                                    "', which are read only as bfloat16 (--dtype bfloat16)"));
    }
    stored = v1::DATA_TYPE_BFLOAT16;
  }
  if (stored == v1::DATA_TYPE_UNSPECIFIED) {
    return Bad(path, absl::StrCat("has elements of type '", descr,
                                  "'; '<f4', '<f2', '<i4', and '<u2' or '|V2' for bfloat16 can be "
                                  "read"));
  }
  if (expected != v1::DATA_TYPE_UNSPECIFIED && stored != expected) {
    return Bad(path, absl::StrCat("holds ", ShortName(stored), " ('", descr, "'), but ",
                                  ShortName(expected), " is expected"));
  }
  return stored;
}

const char* DescrOf(v1::DataType dtype) {
  switch (dtype) {
    case v1::DATA_TYPE_FLOAT32: return "<f4";
    case v1::DATA_TYPE_FLOAT16: return "<f2";
    case v1::DATA_TYPE_BFLOAT16: return "<u2";
    case v1::DATA_TYPE_INT32: return "<i4";
    default: return nullptr;
  }
}

}  // namespace

absl::StatusOr<HostTensor> ReadNpy(const std::string& path, v1::DataType dtype) {
  std::error_code error;
  std::ifstream file(path, std::ios::binary);
  const uintmax_t file_size = std::filesystem::file_size(path, error);
  if (!file || error) {
    return absl::NotFoundError(
        absl::StrCat(path, ": cannot be read: ", error ? error.message() : std::strerror(errno)));
  }
  absl::StatusOr<Header> header = ReadHeader(path, file);
  if (!header.ok()) return header.status();
  absl::StatusOr<v1::DataType> stored = ElementType(path, header->descr, dtype);
  if (!stored.ok()) return stored.status();

  const std::optional<int64_t> bytes = NumBytes(*stored, header->shape);
  const uintmax_t payload = file_size - static_cast<uintmax_t>(file.tellg());
  if (!bytes || static_cast<uintmax_t>(*bytes) != payload) {
    return Bad(path, absl::StrCat("has ", payload, " bytes of elements, but its shape ",
                                  ShapeString(header->shape), " of ", ShortName(*stored), " needs ",
                                  bytes ? absl::StrCat(*bytes) : "more than 2^63"));
  }
  HostTensor tensor = *MakeTensor(*stored, std::move(header->shape));
  if (!file.read(reinterpret_cast<char*>(tensor.data.get()),
                 static_cast<std::streamsize>(*bytes))) {
    return Bad(path, "could not be read to its end");
  }
  return tensor;
}

absl::Status WriteNpy(const std::string& path, v1::DataType dtype,
                      const std::vector<int64_t>& shape, const std::string& data) {
  const char* descr = DescrOf(dtype);
  if (descr == nullptr || NumBytes(dtype, shape) != static_cast<int64_t>(data.size())) {
    return Bad(path, absl::StrCat("cannot be written: ", data.size(), " bytes are no ",
                                  ShortName(dtype), " tensor of shape ", ShapeString(shape)));
  }
  std::string header =
      absl::StrCat("{'descr': '", descr, "', 'fortran_order': False, 'shape': (",
                   absl::StrJoin(shape, ", "), shape.size() == 1 ? ",), }" : "), }");
  // Elements start at a multiple of 64; the header ends with a line feed.
  constexpr size_t kPrefixBytes = kMagicBytes + 4;
  header.append(63 - (kPrefixBytes + header.size()) % 64, ' ');
  header.push_back('\n');
  if (header.size() > std::numeric_limits<uint16_t>::max()) {
    return Bad(path, "cannot be written: the shape is too long");
  }
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(kMagic, kMagicBytes);
  const char version_and_length[] = {1, 0, static_cast<char>(header.size() & 0xff),
                                     static_cast<char>(header.size() >> 8)};
  file.write(version_and_length, sizeof(version_and_length));
  file << header;
  file.write(data.data(), static_cast<std::streamsize>(data.size()));
  file.close();
  if (!file) return absl::UnavailableError(absl::StrCat(path, ": could not be written"));
  return absl::OkStatus();
}

}  // namespace attnd::cli
