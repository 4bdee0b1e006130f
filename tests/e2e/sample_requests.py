"""Small valid requests for every layout, and two whose answers are known."""

from __future__ import annotations

import math
from typing import Any

import attention_oracle
import grpc
import numpy as np
from numpy.typing import NDArray

from attnd.v1 import attention_pb2, types_pb2

LAYOUTS = tuple(
    name.removeprefix("QKV_LAYOUT_")
    for name, value in types_pb2.QkvLayout.items()
    if value != types_pb2.QKV_LAYOUT_UNSPECIFIED
)
ELEMENT_BYTES = {
    types_pb2.DATA_TYPE_UNSPECIFIED: 0,
    types_pb2.DATA_TYPE_FLOAT32: 4,
    types_pb2.DATA_TYPE_FLOAT16: 2,
    types_pb2.DATA_TYPE_BFLOAT16: 2,
    types_pb2.DATA_TYPE_FLOAT8_E4M3: 1,
    types_pb2.DATA_TYPE_FLOAT8_E5M2: 1,
    types_pb2.DATA_TYPE_INT32: 4,
}
# The sizes of every sample. Dense: two sequences of 5 queries and 7 keys. Ragged: of 2 and 3
# queries, and 3 and 4 keys. Layouts with a 3 have as many keys as queries.
BATCH, Q_LEN, KV_LEN, HEADS, KV_HEADS, DIM, DIM_V = 2, 5, 7, 4, 2, 4, 6
Q_ENDS, KV_ENDS = (0, 2, 5), (0, 3, 7)
PAGES, PAGE_SIZE = 5, 2
PAGE_TABLE = ((3, 0), (2, 1))


def zeros(*shape: int, dtype: int = types_pb2.DATA_TYPE_FLOAT32) -> types_pb2.Tensor:
    """A tensor with data of the size that its shape needs; none for impossible shapes."""
    size = math.prod(shape) * ELEMENT_BYTES[dtype]
    data = bytes(size) if 0 <= size < 1 << 24 else b""
    return types_pb2.Tensor(dtype=dtype, shape=shape, data=data)


def floats(*values: float) -> types_pb2.Tensor:
    """A FLOAT32 vector."""
    array = np.asarray(values, dtype="<f4")
    return types_pb2.Tensor(
        dtype=types_pb2.DATA_TYPE_FLOAT32, shape=array.shape, data=array.tobytes()
    )


def page_table(entries: NDArray | tuple = PAGE_TABLE) -> types_pb2.Tensor:
    array = np.asarray(entries, dtype="<i4")
    return types_pb2.Tensor(
        dtype=types_pb2.DATA_TYPE_INT32, shape=array.shape, data=array.tobytes()
    )


def buffer_shapes(layout: str) -> dict[str, list[int]]:
    """The shapes of the sample's buffers, read off the layout's name letter by letter."""
    paged = layout.startswith("PAGED_KV_")
    parts = layout.removeprefix("PAGED_KV_").split("_")
    names = {1: ("qkv",), 2: ("q", "kv"), 3: ("q", "k", "v")}[len(parts)]
    shapes = {}
    for name, part in zip(names, parts):
        on_q_side = name in ("q", "qkv")
        paged_here = paged and not on_q_side
        sizes = {
            "B": PAGES if paged_here else BATCH,
            "S": Q_LEN if on_q_side else PAGE_SIZE if paged_here else KV_LEN,
            "T": Q_ENDS[-1] if on_q_side else KV_ENDS[-1],
            "H": HEADS if on_q_side else KV_HEADS,
            "D": DIM_V if name == "v" else DIM,
        }
        shapes[name] = [int(letter) if letter.isdigit() else sizes[letter] for letter in part]
    return shapes


def sample(layout: str) -> attention_pb2.ForwardRequest:
    """A valid FLOAT32 request of the sizes above, with data of unit variance."""
    if layout == "STRIDED":
        return _strided_sample()
    rng = np.random.default_rng(LAYOUTS.index(layout))
    request = attention_pb2.ForwardRequest()
    request.spec.layout = types_pb2.QkvLayout.Value(f"QKV_LAYOUT_{layout}")
    request.spec.dtype = types_pb2.DATA_TYPE_FLOAT32
    for name, shape in buffer_shapes(layout).items():
        _fill(getattr(request.inputs, name), shape, rng)
    if "T" in layout or layout.startswith("PAGED_KV_"):
        request.sequences.cu_seqlens_q.extend(Q_ENDS)
        request.sequences.cu_seqlens_kv.extend(Q_ENDS if "3" in layout else KV_ENDS)
    if layout.startswith("PAGED_KV_"):
        request.sequences.page_table_k.CopyFrom(page_table())
        request.sequences.page_table_v.CopyFrom(page_table())
    return request


def _strided_sample() -> attention_pb2.ForwardRequest:
    """A fused projection [t, h + 2 g, d] of two ragged sequences, keys beside their queries."""
    request = attention_pb2.ForwardRequest()
    spec = request.spec
    spec.layout = types_pb2.QKV_LAYOUT_STRIDED
    spec.dtype = types_pb2.DATA_TYPE_FLOAT32
    spec.batch, spec.max_seqlen_q, spec.max_seqlen_kv = BATCH, 3, 3
    spec.num_heads, spec.num_kv_heads = HEADS, KV_HEADS
    spec.head_dim_qk, spec.head_dim_v = DIM, DIM
    record = HEADS + 2 * KV_HEADS
    for view, first_head in ((spec.views.q, 0), (spec.views.k, HEADS), (spec.views.v, HEADS + 2)):
        view.buffer = "qkv"
        view.byte_offset = 4 * first_head * DIM
        view.strides.extend((record * DIM, DIM, 1))
    request.sequences.cu_seqlens_q.extend(Q_ENDS)
    request.sequences.cu_seqlens_kv.extend(Q_ENDS)
    _fill(request.inputs.qkv, [Q_ENDS[-1], record, DIM], np.random.default_rng(0))
    return request


def _fill(tensor: types_pb2.Tensor, shape: list[int], rng: np.random.Generator) -> None:
    tensor.dtype = types_pb2.DATA_TYPE_FLOAT32
    tensor.shape.extend(shape)
    tensor.data = rng.standard_normal(shape).astype("<f4").tobytes()


def featured_samples() -> list[attention_pb2.ForwardRequest]:
    """Valid requests with biases, sinks and dropout."""
    bias_shapes = ((1, 1, Q_LEN, KV_LEN), (1, HEADS, Q_LEN, KV_LEN), (BATCH, 1, Q_LEN, KV_LEN))
    bias_shapes += ((BATCH, HEADS, Q_LEN, KV_LEN), (1, 1, 1, KV_LEN))
    requests = []
    for i, shape in enumerate(bias_shapes):
        request = sample("BSHD_BSHD_BSHD")
        request.spec.bias_kind = (types_pb2.BIAS_KIND_PRE_SCALE, types_pb2.BIAS_KIND_POST_SCALE)[
            i % 2
        ]
        _fill(request.bias, list(shape), np.random.default_rng(i))
        requests.append(request)
    alibi = sample("BS3HD")
    alibi.spec.bias_kind = types_pb2.BIAS_KIND_ALIBI
    shard = sample("SBHD_SB2HD")
    shard.spec.bias_kind = types_pb2.BIAS_KIND_ALIBI
    shard.spec.window_alignment = types_pb2.ALIGNMENT_BOTTOM_RIGHT
    shard.spec.alibi.head_offset, shard.spec.alibi.total_heads = HEADS, 3 * HEADS
    sink_of_0 = sample("THD_T2HD")
    sink_of_0.spec.softmax_kind = types_pb2.SOFTMAX_KIND_OFF_BY_ONE
    sinks = sample("BHSD_BHSD_BHSD")
    sinks.spec.softmax_kind = types_pb2.SOFTMAX_KIND_LEARNABLE
    _fill(sinks.softmax_offset, [HEADS], np.random.default_rng(0))
    dropped = sample("T3HD")
    dropped.spec.dropout.probability, dropped.spec.dropout.seed = 0.25, 2**40
    return [*requests, alibi, shard, sink_of_0, sinks, dropped]


def out_shape(request: attention_pb2.ForwardRequest) -> list[int] | None:
    """The shape of O where the request's buffers say one; they may contradict each other."""
    spec, inputs = request.spec, request.inputs
    if spec.layout == types_pb2.QKV_LAYOUT_STRIDED:
        if len(spec.views.q.strides) == 4:
            return [spec.batch, spec.max_seqlen_q, spec.num_heads, spec.head_dim_v]
        sequences = request.sequences
        ends = sequences.cu_seqlens_q_padded or sequences.cu_seqlens_q or [0]
        return [ends[-1], spec.num_heads, spec.head_dim_v]
    if spec.layout not in types_pb2.QkvLayout.values() or spec.layout == 0:
        return None
    name = types_pb2.QkvLayout.Name(spec.layout).removeprefix("QKV_LAYOUT_")
    axes = name.removeprefix("PAGED_KV_").split("_")[0]
    queries, values = (inputs.q, inputs.kv if inputs.HasField("kv") else inputs.v)
    if "3" in axes:
        queries = values = inputs.qkv
    if len(queries.shape) != len(axes) or not values.shape:
        return None
    sizes = [size for axis, size in zip(axes, queries.shape) if axis != "3"]
    return [*sizes[:-1], values.shape[-1]]


def backward_of(request: attention_pb2.ForwardRequest) -> attention_pb2.BackwardRequest:
    """A request for gradients with what the Forward request has, and O, LSE and dO of zeros.

    Where the request is valid and has its buffers, these have the right shapes and types.
    """
    backward = attention_pb2.BackwardRequest()
    for name in ("spec", "sequences", "inputs", "bias", "softmax_offset"):
        if request.HasField(name):
            getattr(backward, name).SetInParent()
            getattr(backward, name).CopyFrom(getattr(request, name))
    shape = out_shape(request) or [1]
    # O [..., s_q, h, d_v] has its heads last but in BHSD; LSE is [b, h, s_q] or [t_q, h].
    layout = request.spec.layout
    lse_shape = shape[:-1]
    if len(shape) == 4:
        name = types_pb2.QkvLayout.Name(layout).removeprefix("QKV_LAYOUT_PAGED_KV_")
        order = {"BH": (0, 1, 2), "SB": (1, 2, 0)}
        axes = order.get(name.removeprefix("QKV_LAYOUT_")[:2], (0, 2, 1))
        lse_shape = [shape[axis] for axis in axes]
    dtype = request.out_dtype or request.spec.dtype
    if dtype not in ELEMENT_BYTES:
        dtype = types_pb2.DATA_TYPE_FLOAT32
    backward.out.CopyFrom(zeros(*shape, dtype=dtype))
    backward.lse.CopyFrom(zeros(*lse_shape))
    backward.d_out.CopyFrom(zeros(*shape, dtype=dtype))
    return backward


def answered_backward_of(
    request: attention_pb2.ForwardRequest, attention: Any
) -> attention_pb2.BackwardRequest:
    """A request for gradients with O and LSE from the server behind the stub, and dO = O.

    As backward_of, where the server refuses the Forward request.
    """
    backward = backward_of(request)
    forward = attention_pb2.ForwardRequest()
    forward.CopyFrom(request)
    forward.return_lse = True
    for name in ("out_placement", "lse_placement", "retain_for_backward"):
        forward.ClearField(name)
    try:
        response = attention.Forward(forward, timeout=60)
    except grpc.RpcError:
        return backward
    backward.out.CopyFrom(response.out)
    backward.lse.CopyFrom(response.lse)
    backward.d_out.CopyFrom(response.out)
    return backward


def plan_of(
    request: attention_pb2.ForwardRequest | attention_pb2.BackwardRequest,
) -> attention_pb2.PlanRequest:
    """The Plan request that asks about a request: the same fields without sources."""
    plan = attention_pb2.PlanRequest()
    if isinstance(request, attention_pb2.BackwardRequest):
        plan.backward = True
    else:
        plan.return_lse, plan.out_dtype = request.return_lse, request.out_dtype
    for name in ("spec", "sequences", "inputs", "bias", "softmax_offset"):
        if request.HasField(name):
            part = getattr(plan, name)
            part.SetInParent()
            part.CopyFrom(getattr(request, name))
    for tensor in _tensors(plan):
        for source in ("data", "values", "handle", "shared_memory"):
            tensor.ClearField(source)
    return plan


def _tensors(plan: attention_pb2.PlanRequest) -> list[types_pb2.Tensor]:
    places = [
        *((plan.inputs, name) for name in ("qkv", "q", "kv", "k", "v")),
        (plan.sequences, "page_table_k"),
        (plan.sequences, "page_table_v"),
        (plan, "bias"),
        (plan, "softmax_offset"),
    ]
    return [getattr(message, name) for message, name in places if message.HasField(name)]


def _set(tensor: types_pb2.Tensor, array: NDArray) -> None:
    tensor.dtype = types_pb2.DATA_TYPE_FLOAT32
    tensor.shape.extend(array.shape)
    tensor.data = array.astype("<f4").tobytes()


class KnownRequest:
    """A request and its answer, and one for its gradients, computed once by NumPy.

    Attributes:
      request: BSHD_BS2HD, one sequence of 3 queries and 6 keys, 2 heads over 1, bottom-right mask.
      backward: the same, with its results and some dO.
    """

    def __init__(self) -> None:
        rng = np.random.default_rng(11)
        q, kv = rng.standard_normal((1, 3, 2, 4)), rng.standard_normal((1, 6, 2, 1, 4))
        q, kv = q.astype("<f4"), kv.astype("<f4")
        self.request = attention_pb2.ForwardRequest(return_lse=True)
        self.request.spec.layout = types_pb2.QKV_LAYOUT_BSHD_BS2HD
        self.request.spec.dtype = types_pb2.DATA_TYPE_FLOAT32
        self.request.spec.causal = types_pb2.CAUSAL_BOTTOM_RIGHT
        _set(self.request.inputs.q, q)
        _set(self.request.inputs.kv, kv)
        d_out = rng.standard_normal((3, 2, 4)).astype("<f4")
        oracle = attention_oracle.Attention(
            q[0], kv[0, :, 0], kv[0, :, 1], visible=np.tri(3, 6, 3, dtype=bool)
        )
        gradients = oracle.backward(d_out)
        self._out, self._d_q = oracle.out[None], gradients["q"][None]
        self._d_kv = np.stack([gradients["k"], gradients["v"]], axis=1)[None]
        self.backward = attention_pb2.BackwardRequest(
            spec=self.request.spec, inputs=self.request.inputs
        )
        _set(self.backward.out, self._out)
        _set(self.backward.lse, oracle.lse.T[None])
        _set(self.backward.d_out, d_out[None])

    def check(self, response: attention_pb2.ForwardResponse) -> None:
        """AssertionError unless the response is the answer."""
        _check(response.out, self._out)
        assert list(response.lse.shape) == [1, 2, 3], response.lse.shape

    def check_backward(self, response: attention_pb2.BackwardResponse) -> None:
        """AssertionError unless the response has the gradients, and no others."""
        grads = {field.name: tensor for field, tensor in response.grads.ListFields()}
        assert grads.keys() == {"q", "kv"}, grads.keys()
        _check(grads["q"], self._d_q)
        _check(grads["kv"], self._d_kv)
        assert not response.HasField("d_bias")
        assert not response.HasField("d_softmax_offset")


def _check(tensor: types_pb2.Tensor, expected: NDArray) -> None:
    assert tuple(tensor.shape) == expected.shape, tensor.shape
    array = np.frombuffer(tensor.data, dtype="<f4").reshape(expected.shape)
    np.testing.assert_allclose(array, expected, atol=1e-5)


def open_channel(address: str) -> grpc.Channel:
    """A channel of its own connection, without gRPC's default message limit."""
    return grpc.insecure_channel(
        address,
        options=[
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", -1),
        ],
    )
