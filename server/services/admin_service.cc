#include "server/services/admin_service.h"

#include <google/protobuf/stubs/common.h>
#include <grpcpp/grpcpp.h>

#include <limits>
#include <utility>

#include "engine/core/layout.h"
#include "server/version.h"
#include "server/wire/decode.h"

namespace attnd {
namespace {

void AddVersion(v1::GetCapabilitiesResponse& response, std::string component, std::string version) {
  v1::Version* entry = response.add_versions();
  entry->set_component(std::move(component));
  entry->set_version(std::move(version));
}

void AddBackend(v1::GetCapabilitiesResponse& response, const BackendInfo& info) {
  v1::BackendCapabilities* backend = response.add_backends();
  backend->set_name(info.name);
  backend->mutable_engines()->Add(info.engines.begin(), info.engines.end());
  for (const DeviceInfo& device : info.devices) {
    v1::Device* entry = backend->add_devices();
    entry->set_name(device.name);
    entry->set_memory_bytes(device.memory_bytes);
    entry->set_compute_units(device.compute_units);
  }
  for (DType dtype : info.dtypes) backend->add_dtypes(static_cast<v1::DataType>(dtype));
  for (int layout = 1; layout < kNumLayouts; ++layout) {
    backend->add_layouts(static_cast<v1::QkvLayout>(layout));
  }
  backend->mutable_features()->Add(info.features.begin(), info.features.end());
}

}  // namespace

AdminService::AdminService(const Engine& engine, std::string incarnation) : engine_(engine) {
  AddVersion(capabilities_, "attnd", kVersion);
  AddVersion(capabilities_, "grpc", grpc::Version());
  AddVersion(capabilities_, "protobuf",
             google::protobuf::internal::VersionString(GOOGLE_PROTOBUF_VERSION));
  for (const AttentionBackend* backend : engine_.backends()) {
    AddBackend(capabilities_, backend->info());
    for (const KernelFamily& family : engine_.disabled()) {
      if (family.backend != backend->info().name) continue;
      capabilities_.mutable_backends()->rbegin()->add_disabled(NameOf(family));
    }
  }
  v1::Limits& limits = *capabilities_.mutable_limits();
  limits.set_message_bytes(std::numeric_limits<int32_t>::max());
  limits.set_pool_bytes(engine_.host_pool().stats().capacity_bytes);
  limits.set_queue_bytes(engine_.queue_bytes());
  limits.set_values_elements(wire::kMaxValues);
  limits.set_batch(kMaxBatch);
  limits.set_heads(kMaxHeads);
  limits.set_head_dim(kMaxHeadDim);
  limits.set_page_size(kMaxPageSize);
  limits.set_metadata_bytes(wire::kMostMetadataBytes);
  capabilities_.set_lse_base("e");
  capabilities_.set_incarnation(std::move(incarnation));
}

grpc::ServerUnaryReactor* AdminService::GetCapabilities(grpc::CallbackServerContext* context,
                                                        const grpc::ByteBuffer* request,
                                                        grpc::ByteBuffer* reply) {
  return AnswerUnary<v1::GetCapabilitiesRequest>(
      context, request, reply,
      [this](const v1::GetCapabilitiesRequest&) -> absl::StatusOr<v1::GetCapabilitiesResponse> {
        return capabilities_;
      });
}

}  // namespace attnd
