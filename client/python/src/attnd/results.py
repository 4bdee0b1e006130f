"""What the calls return."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from attnd import tensors
from attnd.arguments import Dropout, Handle, View
from attnd.v1 import admin_pb2, attention_pb2, types_pb2


@dataclasses.dataclass(frozen=True)
class ExecutionInfo:
    """How a call ran. Times are microseconds."""

    backend: str  # "cuda" or "cpu"
    device: str
    engine: str  # Which kernel family.
    batch_size: int  # Requests that shared the launch.
    queue_us: float
    copy_in_us: float
    compute_us: float
    copy_out_us: float
    transport: str  # "message", "shared_memory" or "resident"
    plan_cache_hit: bool


@dataclasses.dataclass(frozen=True)
class ForwardResult:
    """The outputs of Client.forward. The arrays are read-only.

    Attributes:
      out: in Q's format with head_dim_v last: [b, s_q, h, d_v], [s_q, b, h, d_v], [b, h, s_q, d_v]
        or, for THD, [t_q, h, d_v]. Fully masked rows and rows outside the sequences are 0.
      lse: float32, natural logarithm of the softmax denominator: [b, h, s_q], or [t_q, h] for THD;
        -inf where no key is seen and no sink is either. None without return_lse.
      rng: the seed and offset that dropout used; None without dropout.
      context: names what the server keeps for backward; None without retain_for_backward.
      amax: largest absolute values before scaling, of "s" (the softmax) and "o"; None unless the
        buffers are float8.
      info: how the call ran.
    """

    out: NDArray
    lse: NDArray | None
    rng: Dropout | None
    context: Handle | None
    amax: Mapping[str, float] | None
    info: ExecutionInfo


@dataclasses.dataclass(frozen=True)
class Gradients:
    """Gradients of the buffers, by the same names, in the same shapes and dtype.

    A packed buffer has a packed gradient; what was no input is None. Rows outside the sequences
    are 0.
    """

    qkv: NDArray | None = None
    q: NDArray | None = None
    kv: NDArray | None = None
    k: NDArray | None = None
    v: NDArray | None = None


@dataclasses.dataclass(frozen=True)
class BackwardResult:
    """The outputs of Client.backward. The arrays are read-only.

    Attributes:
      grads: of the buffers: grads.qkv, or grads.q and grads.kv, or grads.q, grads.k and grads.v.
      d_bias: in the bias's shape and dtype, summed over its broadcast axes; None without bias.
      d_softmax_offset: float32 [h]; None without softmax_offset.
      amax: as in ForwardResult, of "d_p" (the gradient of the logits), "d_q", "d_k" and "d_v".
      info: how the call ran.
    """

    grads: Gradients
    d_bias: NDArray | None
    d_softmax_offset: NDArray | None
    amax: Mapping[str, float] | None
    info: ExecutionInfo


@dataclasses.dataclass(frozen=True)
class PlanResult:
    """What forward (or backward) would do with the same arguments.

    Attributes:
      supported: whether the call accepts them.
      reason: where not, the field at fault and the nearest that is supported.
      workspace_bytes: scratch of the kernel.
      device_bytes: everything the call holds: inputs, outputs and workspace.
      resolved: where each of "q", "k", "v", "out" lies; strides are (batch, seq, head, dim) in
        elements, the batch stride of a THD side is 0.
    """

    supported: bool
    reason: str
    backend: str
    engine: str
    workspace_bytes: int
    device_bytes: int
    deterministic_available: bool
    resolved: Mapping[str, View]


@dataclasses.dataclass(frozen=True)
class Device:
    name: str
    memory_bytes: int
    compute_units: int  # Hardware threads, or multiprocessors.


@dataclasses.dataclass(frozen=True)
class BackendCapabilities:
    """What one backend runs. Names are the contract's: "BFLOAT16", "BS3HD"."""

    name: str
    engines: tuple[str, ...]  # Best first.
    devices: tuple[Device, ...]
    dtypes: tuple[str, ...]
    layouts: tuple[str, ...]
    features: tuple[str, ...]
    disabled: tuple[str, ...]  # Kernels that failed the server's self-test.


@dataclasses.dataclass(frozen=True)
class Limits:
    message_bytes: int
    pool_bytes: int
    queue_bytes: int
    values_elements: int


@dataclasses.dataclass(frozen=True)
class Capabilities:
    versions: Mapping[str, str]  # By component; attnd itself first.
    backends: tuple[BackendCapabilities, ...]  # In order of preference.
    limits: Limits
    lse_base: str
    incarnation: str  # Changes with every start of the server.


def forward_result(response: attention_pb2.ForwardResponse) -> ForwardResult:
    return ForwardResult(
        out=tensors.decode(response.out),
        lse=_optional_array(response, "lse"),
        rng=_mirror(Dropout, response.rng) if response.HasField("rng") else None,
        context=_mirror(Handle, response.context) if response.HasField("context") else None,
        amax=_amax(response),
        info=_mirror(ExecutionInfo, response.info),
    )


def backward_result(response: attention_pb2.BackwardResponse) -> BackwardResult:
    grads = response.grads.ListFields()
    return BackwardResult(
        grads=Gradients(**{field.name: tensors.decode(tensor) for field, tensor in grads}),
        d_bias=_optional_array(response, "d_bias"),
        d_softmax_offset=_optional_array(response, "d_softmax_offset"),
        amax=_amax(response),
        info=_mirror(ExecutionInfo, response.info),
    )


def plan_result(response: attention_pb2.PlanResponse) -> PlanResult:
    resolved = {
        name.name: View(
            view.buffer,
            view.byte_offset,
            tuple(view.strides),
            view.group_stride if view.HasField("group_stride") else None,
        )
        for name, view in response.resolved.ListFields()
    }
    return _mirror(PlanResult, response, resolved=resolved)


def capabilities(response: admin_pb2.GetCapabilitiesResponse) -> Capabilities:
    return Capabilities(
        versions={version.component: version.version for version in response.versions},
        backends=tuple(_backend(backend) for backend in response.backends),
        limits=_mirror(Limits, response.limits),
        lse_base=response.lse_base,
        incarnation=response.incarnation,
    )


def _backend(backend: admin_pb2.BackendCapabilities) -> BackendCapabilities:
    dtypes = (types_pb2.DataType.Name(dtype) for dtype in backend.dtypes)
    layouts = (types_pb2.QkvLayout.Name(layout) for layout in backend.layouts)
    return BackendCapabilities(
        name=backend.name,
        engines=tuple(backend.engines),
        devices=tuple(_mirror(Device, device) for device in backend.devices),
        dtypes=tuple(name.removeprefix("DATA_TYPE_") for name in dtypes),
        layouts=tuple(name.removeprefix("QKV_LAYOUT_") for name in layouts),
        features=tuple(backend.features),
        disabled=tuple(backend.disabled),
    )


def _amax(response: Any) -> Mapping[str, float] | None:
    if not response.HasField("amax"):
        return None
    return {field.name: value for field, value in response.amax.ListFields()}


def _optional_array(response: Any, field: str) -> NDArray | None:
    return tensors.decode(getattr(response, field)) if response.HasField(field) else None


def _mirror(cls: type, message: Any, **given: Any) -> Any:
    """An instance of a dataclass from the message's fields of the same names."""
    names = [field.name for field in dataclasses.fields(cls) if field.name not in given]
    return cls(**{name: getattr(message, name) for name in names}, **given)
