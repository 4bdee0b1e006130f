#include "server/wire/decode_tensor.h"

#include <cmath>
#include <string>

#include "engine/core/dtype.h"
#include "server/wire/decode.h"

namespace attnd::wire {
namespace {

std::string Sub(std::string_view field, std::string_view name) {
  return absl::StrCat(View(field), ".", View(name));
}

void NoteUnbuilt(std::string_view field, absl::Status& unbuilt) {
  if (!unbuilt.ok()) return;
  unbuilt = UnimplementedField(reason::kNotBuilt, field,
                               "is not built yet; send the tensor as data or values");
}

// The one source that is set; empty where there is none.
absl::StatusOr<std::string_view> FindSource(const v1::Tensor& tensor, std::string_view field) {
  std::string_view found;
  const std::pair<bool, std::string_view> sources[] = {
      {tensor.has_data(), "data"},
      {tensor.values_size() > 0, "values"},
      {tensor.has_handle(), "handle"},
      {tensor.has_shared_memory(), "shared_memory"}};
  for (const auto& [is_set, name] : sources) {
    if (!is_set) continue;
    if (!found.empty()) {
      return InvalidField(
          reason::kMisplacedField, Sub(field, name),
          absl::StrCat("is set beside ", View(found), "; a tensor has exactly one source"));
    }
    found = name;
  }
  return found;
}

absl::Status CheckSourceSize(const v1::Tensor& tensor, int64_t data_bytes, const TensorDesc& desc,
                             std::string_view source, std::string_view field) {
  const std::optional<int64_t> bytes = NumBytes(desc);
  // A description without a size is wrong, and the resolver says how.
  if (!bytes || desc.dtype == DType::kUnspecified) return absl::OkStatus();
  const int64_t elements = *bytes / SizeOf(desc.dtype);
  if (source.empty()) {
    if (elements == 0) return absl::OkStatus();
    return InvalidField(reason::kMissingField, field,
                        absl::StrCat("has shape ", ShapeString(desc.shape),
                                     " but no source: set data, values, handle or shared_memory"));
  }
  auto mismatch = [&](int64_t have, int64_t want, std::string_view unit) {
    return InvalidField(
        reason::kSizeMismatch, Sub(field, source),
        absl::StrCat("has ", have, " ", View(unit), ", but shape ", ShapeString(desc.shape), " of ",
                     View(Name(desc.dtype)), " needs ", want));
  };
  if (source == "data") {
    if (data_bytes != *bytes) return mismatch(data_bytes, *bytes, "bytes");
  } else if (source == "values") {
    if (tensor.values_size() > kMaxValues) {
      return InvalidField(reason::kSizeMismatch, Sub(field, source),
                          absl::StrCat("has ", tensor.values_size(), " elements; at most ",
                                       kMaxValues, " may travel as values"));
    }
    if (tensor.values_size() != elements) {
      return mismatch(tensor.values_size(), elements, "elements");
    }
  } else if (source == "shared_memory" && tensor.shared_memory().byte_size() != *bytes) {
    return mismatch(tensor.shared_memory().byte_size(), *bytes, "bytes");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckLease(const v1::Lease& lease, std::string_view field) {
  if (std::isfinite(lease.seconds()) && lease.seconds() > 0) return absl::OkStatus();
  return InvalidField(reason::kInvalidField, Sub(field, "seconds"),
                      absl::StrCat("is ", lease.seconds(), "; it must be finite and above 0"));
}

absl::Status CheckRange(const v1::SharedMemoryRange& range, std::string_view field) {
  if (range.region().empty()) {
    return InvalidField(reason::kMissingField, Sub(field, "region"), "is required");
  }
  if (range.byte_offset() < 0) {
    return InvalidField(reason::kInvalidField, Sub(field, "byte_offset"),
                        absl::StrCat("is ", range.byte_offset(), "; it is not negative"));
  }
  if (range.byte_size() < 0) {
    return InvalidField(reason::kInvalidField, Sub(field, "byte_size"),
                        absl::StrCat("is ", range.byte_size(), "; it is not negative"));
  }
  return absl::OkStatus();
}

absl::StatusOr<TensorDesc> DecodeTensor(const v1::Tensor& tensor, const TensorBytes* bytes,
                                        std::string_view field, absl::Status& unbuilt) {
  TensorDesc desc;
  ATTND_RETURN_IF_ERROR(
      DecodeEnum(tensor.dtype(), v1::DataType_IsValid, Sub(field, "dtype"), desc.dtype));
  constexpr int kMostDimensions = 64;
  if (tensor.shape_size() > kMostDimensions) {
    return InvalidField(reason::kShapeMismatch, Sub(field, "shape"),
                        absl::StrCat("has ", tensor.shape_size(),
                                     " dimensions; a tensor has at most ", kMostDimensions));
  }
  desc.shape.assign(tensor.shape().begin(), tensor.shape().end());
  ATTND_ASSIGN_OR_RETURN(const std::string_view source, FindSource(tensor, field));
  if (bytes == nullptr) {
    if (source.empty()) return desc;
    return InvalidField(reason::kMisplacedField, Sub(field, source),
                        "is set, but a plan takes shapes and no tensors");
  }
  if (tensor.has_shared_memory()) {
    ATTND_RETURN_IF_ERROR(CheckRange(tensor.shared_memory(), Sub(field, "shared_memory")));
  }
  ATTND_RETURN_IF_ERROR(CheckSourceSize(tensor, bytes->SizeOf(tensor), desc, source, field));
  if (source == "handle" || source == "shared_memory") NoteUnbuilt(Sub(field, source), unbuilt);
  return desc;
}

void FillTensor(const v1::Tensor& tensor, const TensorBytes& bytes, DType dtype,
                std::span<std::byte> target) {
  if (tensor.has_data()) return bytes.CopyTo(tensor, target);
  for (int i = 0; i < tensor.values_size(); ++i) {
    StoreElement(dtype, target.data(), i, tensor.values(i));
  }
}

absl::Status FillInt32(const v1::Tensor& tensor, const TensorBytes& bytes, std::string_view field,
                       std::span<int32_t> target) {
  if (tensor.has_data()) {
    bytes.CopyTo(tensor, std::as_writable_bytes(target));
    return absl::OkStatus();
  }
  for (int i = 0; i < tensor.values_size(); ++i) {
    const float value = tensor.values(i);
    if (!(value >= -0x1p31f && value < 0x1p31f) || value != std::trunc(value)) {
      return InvalidField(reason::kInvalidField, Sub(field, "values"),
                          absl::StrCat("has ", value, " at ", i, ", which is no INT32"));
    }
    target[static_cast<size_t>(i)] = static_cast<int32_t>(value);
  }
  return absl::OkStatus();
}

}  // namespace attnd::wire
