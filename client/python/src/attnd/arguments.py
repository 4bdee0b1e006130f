"""The arguments of forward, backward and plan, and the one place that turns them into messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

import numpy as np
from numpy.typing import DTypeLike, NDArray

from attnd import masks, tensors
from attnd.v1 import types_pb2

# An array, or for plan its shape.
Buffer = NDArray | tuple[int, ...]

_BUFFER_NAMES = ("qkv", "q", "kv", "k", "v")
_SIZE_NAMES = (
    "batch",
    "max_seqlen_q",
    "max_seqlen_kv",
    "num_heads",
    "num_kv_heads",
    "head_dim_qk",
    "head_dim_v",
    "page_size",
)
_LENGTH_NAMES = (
    "cu_seqlens_q",
    "cu_seqlens_kv",
    "cu_seqlens_q_padded",
    "cu_seqlens_kv_padded",
)


@dataclasses.dataclass(frozen=True)
class View:
    """Where a tensor lies in a buffer.

    Attributes:
      buffer: name of the buffer: "qkv", "q", "kv", "k" or "v" ("out" in a plan).
      byte_offset: position of the first element, in bytes.
      strides: in elements, (batch, seq, head, dim); given for a THD side, (seq, head, dim).
      group_stride: of q alone, in elements: from the query heads of one KV head to those of the
        next, where no head stride says it (attnd.views.megatron).
    """

    buffer: str
    byte_offset: int
    strides: tuple[int, ...]
    group_stride: int | None = None


@dataclasses.dataclass(frozen=True)
class Dropout:
    """Attention dropout: one (seed, offset) gives one mask, in forward and backward.

    Attributes:
      probability: of a cell to be dropped, 0 <= p < 1.
    """

    probability: float
    seed: int = 0
    offset: int = 0


@dataclasses.dataclass(frozen=True)
class Handle:
    """The name of something that a server keeps for as long as its lease says.

    Attributes:
      id: opaque.
      owner: address of the server that keeps it, where it was told one (--advertise).
    """

    id: str
    generation: int = 0
    owner: str = ""


class AttentionArguments(TypedDict, total=False):
    """Keyword arguments of the calls that compute or plan; all are optional where not said.

    Buffers are float32, float16 or ml_dtypes.bfloat16, float8_e4m3fn or float8_e5m2 arrays of one
    dtype, in the shapes that the layout names (b batch, s lengths, t tokens, h query heads, g KV
    heads, d head dims). plan takes shapes (tuples) too, and then needs dtype; or no buffers at all,
    and then needs the sizes.

    qkv: the buffer of layouts with a 3: BS3HD [b, s, 3, h, d], T3HD [t, 3, h, d], ...
    q, kv: layouts with a 2: BSHD_BS2HD [b, s_q, h, d] and [b, s_kv, 2, g, d], ...
    q, k, v: all others: THD_THD_THD [t_q, h, d_qk], [t_kv, g, d_qk] and [t_kv, g, d_v], ...
    dtype: default: that of the buffers.
    cu_seqlens_q, cu_seqlens_kv: integers [b + 1] from 0; sequence i has cu[i + 1] - cu[i] rows.
      Required for THD and paged layouts; in others absent means that all rows count.
    cu_seqlens_q_padded, cu_seqlens_kv_padded: [b + 1], THD sides only: the row where each sequence
      starts, where there are gaps.
    page_table_k, page_table_v: int32 [b, pages], paged layouts only.
    causal: "top_left" (query i sees keys j <= i) or "bottom_right" (j <= i + L_kv - L_q).
    window: (left, right), inclusive reach around the diagonal; None or -1 is unlimited.
    window_alignment: diagonal of a window without causal mask where lengths differ.
    scale: factor of Q K^T, default 1 / sqrt(head_dim_qk).
    logit_softcap: x -> cap tanh(x / cap) on the scaled logits.
    bias_kind: "pre_scale" or "post_scale": bias is added before or after scaling; "alibi":
      -slope(head) |distance to the diagonal| is.
    bias: [1|b, 1|h, 1|s_q, s_kv] in the buffers' dtype, with the first two of these only.
    mask: bool [1|b, 1|h, 1|s_q, s_kv], True where a query attends to a key, as attn_mask of
      PyTorch's scaled_dot_product_attention; axes on the left may be left out, down to
      [s_q, s_kv]. Causal masks, windows and lengths hide more. Sent as a post-scale bias of 0 and
      -inf, so not beside bias or a bias_kind, and not with float8 buffers.
    alibi: (first head, heads in total) of a shard of a model's heads, with "alibi" only.
    softmax_kind: "off_by_one" (denominator 1 + sum exp) or "learnable" (exp(offset) + sum exp).
    softmax_offset: float32 [h], finite or -inf (no sink), with "learnable" only.
    dropout: Dropout(probability, seed, offset).
    fp8: scales of float8 tensors, {"descale_q": 0.01, "scale_o": 100.0, ...}, by the names that
      Fp8Scales has; what is left out is 1.
    deterministic: bitwise equal reruns, or a refusal.
    batch_invariant: the result's bits do not depend on what the call is batched with.
    views: for layout STRIDED: {"q": View, "k": View, "v": View}.
    batch, max_seqlen_q, max_seqlen_kv, num_heads, num_kv_heads, head_dim_qk, head_dim_v, page_size:
      checked where the shapes say them already; STRIDED needs them.
    """

    qkv: Buffer | None
    q: Buffer | None
    kv: Buffer | None
    k: Buffer | None
    v: Buffer | None
    dtype: DTypeLike
    cu_seqlens_q: Sequence[int] | NDArray | None
    cu_seqlens_kv: Sequence[int] | NDArray | None
    cu_seqlens_q_padded: Sequence[int] | NDArray | None
    cu_seqlens_kv_padded: Sequence[int] | NDArray | None
    page_table_k: NDArray | None
    page_table_v: NDArray | None
    causal: Literal["none", "top_left", "bottom_right"]
    window: tuple[int | None, int | None] | None
    window_alignment: Literal["top_left", "bottom_right"] | None
    scale: float | None
    logit_softcap: float | None
    bias_kind: Literal["none", "pre_scale", "post_scale", "alibi"]
    bias: Buffer | None
    mask: Buffer | None
    softmax_kind: Literal["vanilla", "off_by_one", "learnable"]
    softmax_offset: Buffer | None
    alibi: tuple[int, int] | None
    dropout: Dropout | None
    fp8: Mapping[str, float] | None
    deterministic: bool
    batch_invariant: bool
    views: Mapping[str, View] | None
    batch: int | None
    max_seqlen_q: int | None
    max_seqlen_kv: int | None
    num_heads: int | None
    num_kv_heads: int | None
    head_dim_qk: int | None
    head_dim_v: int | None
    page_size: int | None


class ForwardArguments(AttentionArguments, total=False):
    """AttentionArguments, and what forward alone has.

    out_dtype: default: that of the buffers; float32 for partial results.
    return_lse: also return the logarithm of the softmax denominator, which backward needs.
    retain_for_backward: seconds for which the server keeps what backward needs: the result's
      context. Not for plan.
    """

    out_dtype: DTypeLike
    return_lse: bool
    retain_for_backward: float | None


def request_fields(layout: str, arguments: Mapping[str, Any], *, with_data: bool) -> dict[str, Any]:
    """The fields that all requests share, as constructor arguments.

    With with_data the tensors carry their bytes, without it their shapes alone. Raises TypeError or
    ValueError for what no message can say: an unknown argument, name or dtype. Everything else is
    the service's to check.
    """
    unknown = arguments.keys() - AttentionArguments.__annotations__.keys()
    if unknown:
        raise TypeError(f"unknown arguments: {', '.join(sorted(unknown))}")
    given: dict[str, Any] = {name: value for name, value in arguments.items() if value is not None}
    dtype = _dtype(given)
    if "mask" in given:
        given = _with_mask_as_bias(layout, given, dtype, with_data)
    fields: dict[str, Any] = {"spec": _spec(layout, dtype, given)}
    sequences = _sequences(given, with_data)
    if sequences:
        fields["sequences"] = types_pb2.Sequences(**sequences)
    buffers = {
        name: _tensor(name, given[name], dtype, with_data)
        for name in _BUFFER_NAMES
        if name in given
    }
    if buffers:
        fields["inputs"] = types_pb2.QkvBuffers(**buffers)
    if "bias" in given:
        fields["bias"] = _tensor("bias", given["bias"], dtype, with_data)
    if "softmax_offset" in given:
        fields["softmax_offset"] = _tensor(
            "softmax_offset", given["softmax_offset"], np.float32, with_data
        )
    return fields


def forward_fields(layout: str, arguments: ForwardArguments, *, with_data: bool) -> dict[str, Any]:
    """The fields of ForwardRequest and PlanRequest, as request_fields has them."""
    own = ForwardArguments.__annotations__.keys() - AttentionArguments.__annotations__.keys()
    shared = {name: value for name, value in arguments.items() if name not in own}
    fields = request_fields(layout, shared, with_data=with_data)
    fields["return_lse"] = bool(arguments.get("return_lse", False))
    if arguments.get("out_dtype") is not None:
        fields["out_dtype"] = tensors.data_type_of(arguments["out_dtype"])
    if arguments.get("retain_for_backward") is not None:
        fields["retain_for_backward"] = types_pb2.Lease(seconds=arguments["retain_for_backward"])
    return fields


def backward_fields(
    layout: str, arguments: AttentionArguments, results: Mapping[str, NDArray]
) -> dict[str, Any]:
    """The fields of BackwardRequest with everything resent. `results`: "out", "lse", "d_out"."""
    fields = request_fields(layout, arguments, with_data=True)
    for name, array in results.items():
        fields[name] = _array(name, array)
    return fields


def retained_backward_fields(
    context: Handle, d_out: NDArray, fp8: Mapping[str, float] | None
) -> dict[str, Any]:
    """The fields of BackwardRequest with a retained forward."""
    fields: dict[str, Any] = {
        "context": types_pb2.Handle(**dataclasses.asdict(context)),
        "d_out": _array("d_out", d_out),
    }
    if fp8 is not None:
        fields["fp8"] = _fp8_scales(fp8)
    return fields


def _fp8_scales(scales: Mapping[str, float]) -> types_pb2.Fp8Scales:
    unknown = scales.keys() - types_pb2.Fp8Scales.DESCRIPTOR.fields_by_name.keys()
    if unknown:
        raise ValueError(f"fp8 has no scales named {', '.join(sorted(unknown))}")
    return types_pb2.Fp8Scales(**scales)


def _dtype(given: Mapping[str, Any]) -> np.dtype:
    if "dtype" in given:
        return np.dtype(given["dtype"])
    for name in _BUFFER_NAMES:
        if isinstance(given.get(name), np.ndarray):
            return given[name].dtype
    raise TypeError("dtype is required where no buffer is an array")


def _with_mask_as_bias(
    layout: str, given: dict[str, Any], dtype: np.dtype, with_data: bool
) -> dict[str, Any]:
    others = {name: value for name, value in given.items() if name != "mask"}
    mask = given["mask"]
    if with_data or not isinstance(mask, tuple):
        mask = _checked_array("mask", mask)
    bias = masks.bias_of(mask, layout, others, dtype)
    return others | {"bias_kind": "post_scale", "bias": bias}


def _spec(layout: str, dtype: np.dtype, given: Mapping[str, Any]) -> types_pb2.AttentionSpec:
    spec = types_pb2.AttentionSpec(
        layout=_enum_value(types_pb2.QkvLayout, "QKV_LAYOUT_", "layout", layout),
        dtype=tensors.data_type_of(dtype),
        causal=_enum_value(types_pb2.Causal, "CAUSAL_", "causal", given.get("causal", "none")),
        bias_kind=_enum_value(
            types_pb2.BiasKind, "BIAS_KIND_", "bias_kind", given.get("bias_kind", "none")
        ),
        softmax_kind=_enum_value(
            types_pb2.SoftmaxKind,
            "SOFTMAX_KIND_",
            "softmax_kind",
            given.get("softmax_kind", "vanilla"),
        ),
    )
    flags = ("deterministic", "batch_invariant")
    for name in (*_SIZE_NAMES, "scale", "logit_softcap", *flags):
        if name in given:
            setattr(spec, name, given[name])
    if "window" in given:
        left, right = given["window"]
        spec.window.CopyFrom(types_pb2.Window(left=left, right=right))
    if "window_alignment" in given:
        spec.window_alignment = _enum_value(
            types_pb2.Alignment, "ALIGNMENT_", "window_alignment", given["window_alignment"]
        )
    if "alibi" in given:
        head_offset, total_heads = given["alibi"]
        spec.alibi.CopyFrom(types_pb2.Alibi(head_offset=head_offset, total_heads=total_heads))
    if "dropout" in given:
        if not isinstance(given["dropout"], Dropout):
            raise TypeError(f"dropout is an attnd.Dropout, not {given['dropout']!r}")
        spec.dropout.CopyFrom(types_pb2.Dropout(**dataclasses.asdict(given["dropout"])))
    if "fp8" in given:
        spec.fp8.CopyFrom(_fp8_scales(given["fp8"]))
    for name, view in given.get("views", {}).items():
        getattr(spec.views, name).CopyFrom(types_pb2.View(**dataclasses.asdict(view)))
    return spec


def _sequences(given: Mapping[str, Any], with_data: bool) -> dict[str, Any]:
    sequences: dict[str, Any] = {
        name: np.asarray(given[name]).tolist() for name in _LENGTH_NAMES if name in given
    }
    for name in ("page_table_k", "page_table_v"):
        if name in given:
            sequences[name] = _tensor(name, given[name], np.int32, with_data)
    return sequences


def _tensor(name: str, buffer: Buffer, dtype: DTypeLike, with_data: bool) -> types_pb2.Tensor:
    """An array, or without data the shape of one; dtype is that of bare shapes."""
    if with_data:
        return _array(name, buffer)
    if isinstance(buffer, tuple):
        return tensors.encode_shape(buffer, dtype)
    array = _checked_array(name, buffer)
    return tensors.encode_shape(array.shape, array.dtype)


def _array(name: str, array: Buffer) -> types_pb2.Tensor:
    return tensors.encode(_checked_array(name, array))


def _checked_array(name: str, array: Buffer) -> NDArray:
    if isinstance(array, np.ndarray):
        return array
    if isinstance(array, tuple):
        raise TypeError(f"{name} must be an array; only plan takes shapes")
    raise TypeError(f"{name} must be an array, not {type(array).__name__}")


def _enum_value(enum: Any, prefix: str, argument: str, name: str) -> Any:
    """The enum's value of a name without its prefix, in either case."""
    values = {full_name.removeprefix(prefix): value for full_name, value in enum.items()}
    if not isinstance(name, str) or name.upper() not in values:
        raise ValueError(f"{argument} {name!r} is none of {', '.join(values)}")
    return values[name.upper()]
