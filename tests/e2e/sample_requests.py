"""Small valid requests for every layout, and one whose answer is known."""

from __future__ import annotations

import math

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


def plan_of(request: attention_pb2.ForwardRequest) -> attention_pb2.PlanRequest:
    """The Plan request that asks about a Forward request: the same fields without sources."""
    plan = attention_pb2.PlanRequest(return_lse=request.return_lse, out_dtype=request.out_dtype)
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


class KnownRequest:
    """A request and its answer, computed once by NumPy.

    Attributes:
      request: BSHD_BS2HD, one sequence of 3 queries and 6 keys, 2 heads over 1, bottom-right mask.
      out: [1, 3, 2, 4] float64.
    """

    def __init__(self) -> None:
        rng = np.random.default_rng(11)
        q, kv = rng.standard_normal((1, 3, 2, 4)), rng.standard_normal((1, 6, 2, 1, 4))
        q, kv = q.astype("<f4"), kv.astype("<f4")
        self.request = attention_pb2.ForwardRequest(return_lse=True)
        self.request.spec.layout = types_pb2.QKV_LAYOUT_BSHD_BS2HD
        self.request.spec.dtype = types_pb2.DATA_TYPE_FLOAT32
        self.request.spec.causal = types_pb2.CAUSAL_BOTTOM_RIGHT
        for name, array in (("q", q), ("kv", kv)):
            tensor = getattr(self.request.inputs, name)
            tensor.dtype = types_pb2.DATA_TYPE_FLOAT32
            tensor.shape.extend(array.shape)
            tensor.data = array.tobytes()
        logits = np.einsum("ihd,jd->ihj", *(x.astype("f8") for x in (q[0], kv[0, :, 0, 0]))) / 2
        weights = np.exp(logits) * np.tri(3, 6, 3)[:, None]
        weights /= weights.sum(axis=-1, keepdims=True)
        self.out = np.einsum("ihj,jd->ihd", weights, kv[0, :, 1, 0].astype("f8"))[None]

    def check(self, response: attention_pb2.ForwardResponse) -> None:
        """AssertionError unless the response is the answer."""
        assert list(response.out.shape) == [1, 3, 2, 4], response.out.shape
        out = np.frombuffer(response.out.data, dtype="<f4").reshape(1, 3, 2, 4)
        np.testing.assert_allclose(out, self.out, atol=1e-5)
        assert list(response.lse.shape) == [1, 2, 3], response.lse.shape


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
