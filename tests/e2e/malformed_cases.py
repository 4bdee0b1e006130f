"""Requests with one thing wrong, and the field that the refusal must name.

A case is an edit of a valid sample (sample_requests.sample): paths of fields and their new values,
None for a field to clear.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import grpc
from sample_requests import floats, page_table, sample, zeros

from attnd.v1 import attention_pb2, types_pb2

INVALID, UNIMPLEMENTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED
NAN, INF, HUGE = math.nan, math.inf, 2**62
HALF, INT32 = types_pb2.DATA_TYPE_FLOAT16, types_pb2.DATA_TYPE_INT32
E4M3, E5M2 = types_pb2.DATA_TYPE_FLOAT8_E4M3, types_pb2.DATA_TYPE_FLOAT8_E5M2
TOP_LEFT, BOTTOM_RIGHT = types_pb2.ALIGNMENT_TOP_LEFT, types_pb2.ALIGNMENT_BOTTOM_RIGHT
PRE_SCALE, POST_SCALE = types_pb2.BIAS_KIND_PRE_SCALE, types_pb2.BIAS_KIND_POST_SCALE
ALIBI = types_pb2.BIAS_KIND_ALIBI
LEARNABLE = types_pb2.SOFTMAX_KIND_LEARNABLE
HANDLE = types_pb2.Handle(id="h", generation=1)
LEASE = types_pb2.Lease(seconds=60)
NO_LEASE = types_pb2.Lease()


@dataclasses.dataclass(frozen=True)
class Case:
    """One mistake.

    Attributes:
      what: what is wrong, for the reader.
      layout: of the sample that is edited.
      edits: path -> value.
      field: full path that the refusal names.
      code: of the refusal.
      in_plan: whether Plan can see it; else only Forward is asked.
      in_backward: whether Backward refuses it too, for the same reason.
    """

    what: str
    layout: str
    edits: Mapping[str, Any]
    field: str
    code: grpc.StatusCode = INVALID
    in_plan: bool = True
    in_backward: bool = True

    def request(self) -> attention_pb2.ForwardRequest:
        request = sample(self.layout)
        for path, value in self.edits.items():
            edit(request, path, value)
        return request


def edit(message: Any, path: str, value: Any) -> None:
    *parents, leaf = path.split(".")
    for parent in parents:
        message = getattr(message, parent)
    field = message.DESCRIPTOR.fields_by_name[leaf]
    if value is None:
        message.ClearField(leaf)
    elif field.label == field.LABEL_REPEATED:
        message.ClearField(leaf)
        getattr(message, leaf).extend(value)
    elif field.message_type is not None:
        getattr(message, leaf).SetInParent()
        getattr(message, leaf).CopyFrom(value)
    else:
        setattr(message, leaf, value)


def _shared(**fields: Any) -> types_pb2.SharedMemoryRange:
    return types_pb2.SharedMemoryRange(**fields)


# Buffers of the samples: BS3HD qkv [2, 5, 3, 4, 4]; BSHD_BSHD_BSHD q [2, 5, 4, 4], k [2, 7, 2, 4],
# v [2, 7, 2, 6]; THD_THD_THD q [5, 4, 4], k [7, 2, 4], v [7, 2, 6].
PACKED, DENSE, RAGGED, PAGED = "BS3HD", "BSHD_BSHD_BSHD", "THD_THD_THD", "PAGED_KV_BSHD_BSHD_BSHD"

SHAPES = [
    Case("rank 4 for 5", PACKED, {"inputs.qkv": zeros(2, 5, 12, 4)}, "inputs.qkv"),
    Case("rank 5 for 4", DENSE, {"inputs.q": zeros(2, 5, 4, 4, 1)}, "inputs.q"),
    Case("a scalar", DENSE, {"inputs.k": zeros()}, "inputs.k"),
    Case("100,000 dimensions", DENSE, {"inputs.q": zeros(*[1] * 100_000)}, "inputs.q.shape"),
    Case("a 2 for the 3", PACKED, {"inputs.qkv": zeros(2, 5, 2, 4, 4)}, "inputs.qkv"),
    Case("the 3 before the heads", "BSH3D", {"inputs.qkv": zeros(2, 5, 3, 4, 4)}, "inputs.qkv"),
    Case("the 3 after the heads", "T3HD", {"inputs.qkv": zeros(5, 4, 3, 4)}, "inputs.qkv"),
    Case("a 3 for the 2", "BSHD_BS2HD", {"inputs.kv": zeros(2, 7, 3, 2, 4)}, "inputs.kv"),
    Case("a 1 for the 2", "THD_TH2D", {"inputs.kv": zeros(7, 2, 1, 4)}, "inputs.kv"),
    Case("K's batch and rows swapped", DENSE, {"inputs.k": zeros(7, 2, 2, 4)}, "inputs.k"),
    Case("K as SBHD", "SBHD_BSHD_BSHD", {"inputs.k": zeros(7, 2, 2, 4)}, "inputs.k"),
    Case(
        "Q's rows and heads swapped",
        DENSE,
        {"inputs.q": zeros(2, 4, 5, 4), "spec.num_heads": 4},
        "inputs.q",
    ),
    Case("K as BSHD", "BHSD_BHSD_BHSD", {"inputs.k": zeros(2, 7, 2, 4)}, "inputs.v"),
    Case("fewer rows in V", DENSE, {"inputs.v": zeros(2, 6, 2, 6)}, "inputs.v"),
    Case("fewer tokens in V", RAGGED, {"inputs.v": zeros(6, 2, 6)}, "inputs.v"),
    Case("fewer heads in V", DENSE, {"inputs.v": zeros(2, 7, 1, 6)}, "inputs.v"),
    Case("another batch in V", DENSE, {"inputs.v": zeros(3, 7, 2, 6)}, "inputs.v"),
    Case("another head dim in K", DENSE, {"inputs.k": zeros(2, 7, 2, 8)}, "inputs.k"),
    Case(
        "3 KV heads for 4 heads",
        DENSE,
        {"inputs.k": zeros(2, 7, 3, 4), "inputs.v": zeros(2, 7, 3, 6)},
        "spec.num_kv_heads",
    ),
    Case("no heads", DENSE, {"inputs.q": zeros(2, 5, 0, 4)}, "inputs.q"),
    Case("head dim 0", DENSE, {"inputs.v": zeros(2, 7, 2, 0)}, "inputs.v"),
    Case("batch 0", DENSE, {"inputs.q": zeros(0, 5, 4, 4)}, "inputs.q"),
    Case("a negative dimension", DENSE, {"inputs.q": zeros(2, -5, 4, 4)}, "inputs.q.shape"),
    Case("elements past 2^63", DENSE, {"inputs.q": zeros(HUGE, HUGE, 4, 4)}, "inputs.q.shape"),
    Case("bytes past 2^63", DENSE, {"inputs.k": zeros(2, 2**58, 2, 4)}, "inputs.k.shape"),
    Case("empty and huge", DENSE, {"inputs.v": zeros(2, 0, HUGE, HUGE)}, "inputs.v.shape"),
    Case("the least dimension", DENSE, {"inputs.k": zeros(-(2**63), 7, 2, 4)}, "inputs.k.shape"),
    Case("missing K", DENSE, {"inputs.k": None}, "inputs.k"),
    Case("no buffers", PACKED, {"inputs.qkv": None, "inputs.q": zeros(1)}, "inputs.qkv"),
    Case("a surplus qkv", DENSE, {"inputs.qkv": zeros(2, 5, 3, 4, 4)}, "inputs.qkv"),
    Case("a surplus q", PACKED, {"inputs.q": zeros(2, 5, 4, 4)}, "inputs.q"),
    Case("a surplus kv", DENSE, {"inputs.kv": zeros(2, 7, 2, 2, 4)}, "inputs.kv"),
    Case("a surplus v", "BSHD_BS2HD", {"inputs.v": zeros(2, 7, 2, 4)}, "inputs.v"),
]

SIZES = [
    *(
        Case(f"another {size}: {value}", DENSE, {f"spec.{size}": value}, field)
        for size, value, field in (
            ("batch", 3, "inputs.q"),
            ("max_seqlen_q", 6, "inputs.q"),
            ("max_seqlen_kv", 6, "inputs.k"),
            ("num_heads", 8, "inputs.q"),
            ("num_kv_heads", 1, "inputs.k"),
            ("head_dim_qk", 5, "inputs.q"),
            ("head_dim_qk", HUGE, "inputs.q"),
            ("head_dim_v", 5, "inputs.v"),
        )
    ),
    *(
        Case(f"{size} {value}", DENSE, {f"spec.{size}": value}, f"spec.{size}")
        for size, value in (
            ("batch", 0),
            ("batch", -1),
            ("max_seqlen_q", -1),
            ("max_seqlen_kv", -(2**63)),
            ("num_heads", 0),
            ("num_kv_heads", -2),
            ("head_dim_qk", -1),
            ("head_dim_v", 0),
        )
    ),
    Case(
        "d_qk and d_v differ in a 3-packed layout",
        PACKED,
        {"spec.head_dim_qk": 4, "spec.head_dim_v": 8},
        "spec.head_dim_v",
    ),
    Case(
        "d_qk and d_v differ in a 2-packed layout",
        "THD_T2HD",
        {"spec.head_dim_qk": 4, "spec.head_dim_v": 8},
        "spec.head_dim_v",
    ),
    Case("d_v is not the buffer's", "SBH3D", {"spec.head_dim_v": 8}, "inputs.qkv"),
    Case(
        "h and g differ in a 3-packed layout",
        PACKED,
        {"spec.num_heads": 4, "spec.num_kv_heads": 2},
        "spec.num_kv_heads",
    ),
    Case(
        "s_q and s_kv differ in a 3-packed layout",
        PACKED,
        {"spec.max_seqlen_q": 5, "spec.max_seqlen_kv": 6},
        "spec.max_seqlen_kv",
    ),
    Case("longest query above its bound", RAGGED, {"spec.max_seqlen_q": 2}, "spec.max_seqlen_q"),
    Case("longest key above its bound", RAGGED, {"spec.max_seqlen_kv": 3}, "spec.max_seqlen_kv"),
]

SOURCES = [
    *(
        Case(what, PACKED, edits, field, in_plan=False)
        for what, edits, field in (
            ("short data", {"inputs.qkv.data": bytes(4 * 479)}, "inputs.qkv.data"),
            ("long data", {"inputs.qkv.data": bytes(4 * 480 + 1)}, "inputs.qkv.data"),
            ("empty data", {"inputs.qkv.data": b""}, "inputs.qkv.data"),
            ("no source", {"inputs.qkv.data": None}, "inputs.qkv"),
            ("data and values", {"inputs.qkv.values": [0] * 480}, "inputs.qkv.values"),
            ("data and a handle", {"inputs.qkv.handle": HANDLE}, "inputs.qkv.handle"),
            (
                "data and shared memory",
                {"inputs.qkv.shared_memory": _shared(region="r", byte_size=1920)},
                "inputs.qkv.shared_memory",
            ),
            (
                "too few values",
                {"inputs.qkv.data": None, "inputs.qkv.values": [1] * 479},
                "inputs.qkv.values",
            ),
            (
                "too many values",
                {"inputs.qkv.data": None, "inputs.qkv.values": [1] * 481},
                "inputs.qkv.values",
            ),
            (
                "more values than may travel",
                {
                    "inputs.qkv": types_pb2.Tensor(
                        dtype=1, shape=[1, 86, 3, 4, 4], values=[1] * 4128
                    )
                },
                "inputs.qkv.values",
            ),
            (
                "shared memory of another size",
                {
                    "inputs.qkv.data": None,
                    "inputs.qkv.shared_memory": _shared(region="r", byte_size=1919),
                },
                "inputs.qkv.shared_memory",
            ),
            (
                "shared memory without a region",
                {"inputs.qkv.data": None, "inputs.qkv.shared_memory": _shared(byte_size=1920)},
                "inputs.qkv.shared_memory.region",
            ),
            (
                "shared memory before its region",
                {
                    "inputs.qkv.data": None,
                    "inputs.qkv.shared_memory": _shared(region="r", byte_offset=-4, byte_size=1920),
                },
                "inputs.qkv.shared_memory.byte_offset",
            ),
        )
    ),
]

TYPES = [
    Case("no spec", DENSE, {"spec": None}, "spec"),
    Case("no layout", DENSE, {"spec.layout": 0}, "spec.layout"),
    Case("no dtype", DENSE, {"spec.dtype": 0}, "spec.dtype"),
    Case("INT32 attention", DENSE, {"spec.dtype": INT32}, "spec.dtype"),
    Case("K without dtype", DENSE, {"inputs.k.dtype": 0}, "inputs.k.dtype"),
    Case(
        "K of another dtype",
        DENSE,
        {"inputs.k": zeros(2, 7, 2, 4, dtype=HALF)},
        "inputs.k.dtype",
    ),
    Case("Q of INT32", DENSE, {"inputs.q.dtype": INT32}, "inputs.q.dtype"),
    Case("16-bit output of FLOAT32", DENSE, {"out_dtype": HALF}, "out_dtype"),
    Case("INT32 output", DENSE, {"out_dtype": INT32}, "out_dtype"),
    *(
        Case(f"{field} {value}", PAGED, {field: value}, field)
        for field, value in (
            ("spec.layout", 28),
            ("spec.layout", -1),
            ("spec.dtype", 99),
            ("spec.causal", 3),
            ("spec.window_alignment", 3),
            ("spec.bias_kind", 4),
            ("spec.softmax_kind", -(2**31)),
            ("inputs.q.dtype", 7),
            ("inputs.k.dtype", 256),
            ("sequences.page_table_k.dtype", 7),
            ("bias.dtype", 7),
            ("softmax_offset.dtype", 2**31 - 1),
            ("out_dtype", 7),
        )
    ),
]


def _cu(q: Any = None, kv: Any = None, q_padded: Any = None, kv_padded: Any = None) -> dict:
    arrays = {"q": q, "kv": kv, "q_padded": q_padded, "kv_padded": kv_padded}
    return {
        f"sequences.cu_seqlens_{name}": array for name, array in arrays.items() if array is not None
    }


CU_Q, CU_KV = "sequences.cu_seqlens_q", "sequences.cu_seqlens_kv"
PAD_Q, PAD_KV = "sequences.cu_seqlens_q_padded", "sequences.cu_seqlens_kv_padded"

SEQUENCES = [
    *(
        Case(what, layout, edits, field)
        for what, layout, edits, field in (
            ("starts at 1", RAGGED, _cu(q=[1, 2, 5]), CU_Q),
            ("starts below 0", RAGGED, _cu(kv=[-1, 3, 7]), CU_KV),
            ("decreases", RAGGED, _cu(q=[0, 3, 2]), CU_Q),
            ("decreases on a dense side", DENSE, _cu([0, 5, 10], [0, 7, 6]), CU_KV),
            ("goes below 0", RAGGED, _cu(kv=[0, -(2**63), 7]), CU_KV),
            ("ends at 2^63 - 1", RAGGED, _cu(q=[0, 2, 2**63 - 1]), CU_Q),
            ("one sequence too few", DENSE, _cu([0, 5], [0, 7]), CU_Q),
            ("one sequence too many", DENSE, _cu([0, 1, 2, 3], [0, 1, 2, 3]), CU_Q),
            ("sides differ in number", RAGGED, _cu(kv=[0, 3, 5, 7]), CU_KV),
            ("no sequence", RAGGED, _cu([0], [0]), CU_Q),
            ("only Q's", DENSE, _cu([0, 5, 10]), CU_KV),
            ("only K's", DENSE, _cu(kv=[0, 7, 14]), CU_Q),
            ("none on THD", RAGGED, _cu([], []), CU_Q),
            ("none for K on THD", RAGGED, _cu(kv=[]), CU_KV),
            ("none on paged", PAGED, _cu([], []), CU_Q),
            ("only positions", RAGGED, _cu([], [], [0, 2, 5], [0, 3, 7]), CU_Q),
            ("longer than the axis", DENSE, _cu([0, 5, 11], [0, 7, 14]), CU_Q),
            ("K longer than the axis", "SBHD_SBHD_SBHD", _cu([0, 5, 10], [0, 8, 9]), CU_KV),
            ("past the token buffer", RAGGED, _cu(q=[0, 2, 6]), CU_Q),
            ("K past the token buffer", "THD_T2HD", _cu(kv=[0, 3, 8]), CU_KV),
            ("lengths differ where the axis is one", PACKED, _cu([0, 5, 10], [0, 5, 9]), CU_KV),
            ("lengths differ in T3HD", "T3HD", _cu(kv=[0, 3, 5]), CU_KV),
            ("positions differ in TH3D", "TH3D", _cu(q_padded=[0, 2, 5]), PAD_KV),
            ("positions on a dense side", DENSE, _cu([0, 1, 2], [0, 1, 2], [0, 5, 9]), PAD_Q),
            ("positions of dense K", "THD_BSHD_BSHD", _cu(kv_padded=[0, 3, 7]), PAD_KV),
            ("too few positions", RAGGED, _cu(q_padded=[0, 2]), PAD_Q),
            ("a negative position", RAGGED, _cu(q_padded=[-1, 2, 5]), PAD_Q),
            ("no room for a sequence", RAGGED, _cu(kv_padded=[0, 2, 7]), PAD_KV),
            ("positions past the buffer", RAGGED, _cu(q_padded=[0, 2, 6]), PAD_Q),
            ("positions at the end of int64", RAGGED, _cu(kv_padded=[0, 3, 2**63 - 1]), PAD_KV),
            ("a start outside the buffer", RAGGED, _cu(q_padded=[4, 6, 9]), PAD_Q),
        )
    ),
]

TABLE_K, TABLE_V = "sequences.page_table_k", "sequences.page_table_v"

PAGES = [
    Case("no table of K", PAGED, {TABLE_K: None}, TABLE_K),
    Case("no table of V", PAGED, {TABLE_V: None}, TABLE_V),
    Case("a table of floats", PAGED, {TABLE_K: zeros(2, 2)}, f"{TABLE_K}.dtype"),
    Case("a table of rank 3", PAGED, {TABLE_K: zeros(2, 2, 1, dtype=INT32)}, TABLE_K),
    Case("a table of another batch", PAGED, {TABLE_V: zeros(3, 2, dtype=INT32)}, TABLE_V),
    Case("tables of two widths", PAGED, {TABLE_V: zeros(2, 3, dtype=INT32)}, TABLE_V),
    *(
        Case(what, PAGED, edits, field, in_plan=False, in_backward=False)
        for what, edits, field in (
            ("page -1", {TABLE_K: page_table(((3, 0), (-1, 1)))}, TABLE_K),
            ("page 5 of 5", {TABLE_V: page_table(((3, 0), (2, 5)))}, TABLE_V),
            (
                "page 1.5",
                {f"{TABLE_K}.data": None, f"{TABLE_K}.values": [3, 0, 1.5, 1]},
                f"{TABLE_K}.values",
            ),
        )
    ),
    Case("a short table", PAGED, {f"{TABLE_K}.data": bytes(15)}, f"{TABLE_K}.data", in_plan=False),
    Case("another page size", PAGED, {"spec.page_size": 4}, "inputs.k"),
    Case("page size 0", PAGED, {"spec.page_size": 0}, "spec.page_size"),
    Case("page size of a dense layout", DENSE, {"spec.page_size": 2}, "spec.page_size"),
    Case("page sizes differ", PAGED, {"inputs.v": zeros(5, 4, 2, 6)}, "inputs.v"),
    Case("max_seqlen_kv past the pages", PAGED, {"spec.max_seqlen_kv": 5}, TABLE_K),
    Case("a length past the pages", PAGED, _cu(kv=[0, 3, 8]), TABLE_K),
    Case("max_seqlen_kv below a length", PAGED, {"spec.max_seqlen_kv": 3}, "spec.max_seqlen_kv"),
    Case("a table on a dense layout", DENSE, {TABLE_K: page_table()}, TABLE_K),
]

FEATURES = [
    *(
        Case(f"{field} {value}", DENSE, {f"spec.{field}": value}, f"spec.{field}")
        for field, value in (
            ("window.left", -2),
            ("window.right", -(2**63)),
            ("scale", NAN),
            ("scale", -INF),
            ("logit_softcap", 0),
            ("logit_softcap", -1),
            ("logit_softcap", NAN),
            ("logit_softcap", INF),
            ("dropout.probability", 1),
            ("dropout.probability", -0.1),
            ("dropout.probability", NAN),
        )
    ),
    Case("a window without alignment", DENSE, {"spec.window.left": 1}, "spec.window_alignment"),
    Case(
        "alignment against the mask",
        DENSE,
        {"spec.causal": types_pb2.CAUSAL_TOP_LEFT, "spec.window_alignment": BOTTOM_RIGHT},
        "spec.window_alignment",
    ),
    Case(
        "alignment against the other mask",
        DENSE,
        {"spec.causal": types_pb2.CAUSAL_BOTTOM_RIGHT, "spec.window_alignment": TOP_LEFT},
        "spec.window_alignment",
    ),
    Case(
        "slopes without ALiBi",
        DENSE,
        {"spec.alibi": types_pb2.Alibi(total_heads=4)},
        "spec.alibi",
    ),
    Case(
        "a shard past the heads",
        DENSE,
        {
            "spec.bias_kind": ALIBI,
            "spec.window_alignment": TOP_LEFT,
            "spec.alibi": types_pb2.Alibi(head_offset=2**63 - 1, total_heads=4),
        },
        "spec.alibi",
    ),
    Case("ALiBi without alignment", DENSE, {"spec.bias_kind": ALIBI}, "spec.window_alignment"),
    Case("no bias", DENSE, {"spec.bias_kind": POST_SCALE}, "bias"),
    Case("a surplus bias", DENSE, {"bias": zeros(1, 1, 5, 7)}, "bias"),
    Case("a bias of rank 2", DENSE, {"spec.bias_kind": PRE_SCALE, "bias": zeros(5, 7)}, "bias"),
    Case(
        "a bias of other heads",
        DENSE,
        {"spec.bias_kind": POST_SCALE, "bias": zeros(1, 2, 5, 7)},
        "bias",
    ),
    Case(
        "a bias of another dtype",
        DENSE,
        {"spec.bias_kind": POST_SCALE, "bias": zeros(1, 1, 5, 7, dtype=HALF)},
        "bias.dtype",
    ),
    Case("no sink", DENSE, {"spec.softmax_kind": LEARNABLE}, "softmax_offset"),
    Case("a surplus sink", DENSE, {"softmax_offset": zeros(4)}, "softmax_offset"),
    Case(
        "a sink too few",
        DENSE,
        {"spec.softmax_kind": LEARNABLE, "softmax_offset": zeros(3)},
        "softmax_offset",
    ),
    Case(
        "sinks of another dtype",
        DENSE,
        {"spec.softmax_kind": LEARNABLE, "softmax_offset": zeros(4, dtype=HALF)},
        "softmax_offset.dtype",
    ),
    *(
        Case(
            f"a sink of {value}",
            DENSE,
            {"spec.softmax_kind": LEARNABLE, "softmax_offset": floats(0, -INF, value, 1)},
            "softmax_offset",
            in_plan=False,
        )
        for value in (INF, NAN)
    ),
    Case("FP8 scales of FLOAT32", DENSE, {"spec.fp8": types_pb2.Fp8Scales()}, "spec.fp8"),
    *(
        Case(
            f"a scale of {value}",
            PACKED,
            {
                "spec.dtype": E4M3,
                "inputs.qkv": zeros(2, 5, 3, 4, 4, dtype=E4M3),
                "spec.fp8": types_pb2.Fp8Scales(descale_q=2, **{name: value}),
            },
            f"spec.fp8.{name}",
        )
        for name, value in (
            ("descale_k", 0),
            ("scale_o", -1),
            ("scale_s", math.inf),
            ("scale_d_v", math.nan),
        )
    ),
    Case(
        "E5M2 inputs of an E4M3 problem",
        PACKED,
        {"spec.dtype": E4M3, "inputs.qkv": zeros(2, 5, 3, 4, 4, dtype=E5M2)},
        "inputs.qkv.dtype",
    ),
    Case(
        "views of a named layout",
        DENSE,
        {f"spec.views.{name}.buffer": name for name in "qkv"},
        "spec.views",
    ),
]

VALUES = types_pb2.Placement.AsValues()

PLACEMENTS = [
    Case(what, DENSE, edits, field, in_plan=False)
    for what, edits, field in (
        ("LSE placed but not returned", {"lse_placement.values": VALUES}, "lse_placement"),
        (
            "an output too large for values",
            {"inputs.q": zeros(2, 200, 4, 4), "out_placement.values": VALUES},
            "out_placement.values",
        ),
        (
            "an LSE too large for values",
            {
                "inputs.q": zeros(2, 600, 4, 4),
                "return_lse": True,
                "lse_placement.values": VALUES,
            },
            "lse_placement.values",
        ),
        (
            "a lease of 0 s",
            {"out_placement.resident": NO_LEASE},
            "out_placement.resident.seconds",
        ),
        (
            "a lease for ever",
            {"return_lse": True, "lse_placement.resident": types_pb2.Lease(seconds=INF)},
            "lse_placement.resident.seconds",
        ),
        ("retained for 0 s", {"retain_for_backward": NO_LEASE}, "retain_for_backward.seconds"),
        (
            "an output to no region",
            {"out_placement.shared_memory": _shared(byte_size=1)},
            "out_placement.shared_memory.region",
        ),
        (
            "an output of negative size",
            {"out_placement.shared_memory": _shared(region="r", byte_size=-1)},
            "out_placement.shared_memory.byte_size",
        ),
    )
]

VIEW_Q, VIEW_K, VIEW_V = "spec.views.q", "spec.views.k", "spec.views.v"

STRIDED = [
    *(
        Case(f"no {field}", "STRIDED", {f"spec.{field}": None}, f"spec.{field}")
        for field in (
            "batch",
            "max_seqlen_q",
            "max_seqlen_kv",
            "num_heads",
            "num_kv_heads",
            "head_dim_qk",
            "head_dim_v",
            "views",
            "views.k",
        )
    ),
    *(
        Case(what, "STRIDED", edits, field)
        for what, edits, field in (
            ("an unknown buffer", {f"{VIEW_Q}.buffer": "Q"}, f"{VIEW_Q}.buffer"),
            ("a buffer that is not there", {f"{VIEW_K}.buffer": "k"}, "inputs.k"),
            ("a buffer that no view names", {"inputs.kv": zeros(4)}, "inputs.kv"),
            ("a negative stride", {f"{VIEW_K}.strides": [-32, 4, 1]}, f"{VIEW_K}.strides"),
            ("2 strides", {f"{VIEW_Q}.strides": [32, 1]}, f"{VIEW_Q}.strides"),
            ("5 strides", {f"{VIEW_V}.strides": [1, 1, 1, 1, 1]}, f"{VIEW_V}.strides"),
            ("groups of K", {f"{VIEW_K}.group_stride": 8}, f"{VIEW_K}.group_stride"),
            ("a negative group stride", {f"{VIEW_Q}.group_stride": -8}, f"{VIEW_Q}.group_stride"),
            ("leaves by its group stride", {f"{VIEW_Q}.group_stride": 96}, VIEW_Q),
            ("K ragged and V dense", {f"{VIEW_V}.strides": [64, 32, 4, 1]}, f"{VIEW_V}.strides"),
            ("a misaligned offset", {f"{VIEW_K}.byte_offset": 66}, f"{VIEW_K}.byte_offset"),
            ("a negative offset", {f"{VIEW_K}.byte_offset": -4}, f"{VIEW_K}.byte_offset"),
            ("leaves by one element", {f"{VIEW_V}.byte_offset": 100}, VIEW_V),
            ("starts outside", {f"{VIEW_K}.byte_offset": HUGE}, VIEW_K),
            ("leaves by its row stride", {f"{VIEW_Q}.strides": [40, 4, 1]}, VIEW_Q),
            ("leaves by its head stride", {f"{VIEW_K}.strides": [32, 20, 1]}, VIEW_K),
            ("leaves by its dim stride", {f"{VIEW_V}.strides": [32, 4, 3]}, VIEW_V),
            ("reaches past 2^63", {f"{VIEW_Q}.strides": [HUGE, 4, 1]}, VIEW_Q),
            ("heads outside the buffer", {"spec.num_heads": 16}, VIEW_Q),
            ("h % g", {"spec.num_kv_heads": 3, f"{VIEW_V}.byte_offset": 0}, "spec.num_kv_heads"),
            ("page size without tables", {"spec.page_size": 2}, "spec.page_size"),
            ("tables and ragged K", {TABLE_K: page_table()}, f"{VIEW_K}.strides"),
            ("rows past the buffer", _cu(q=[0, 2, 6]), CU_Q),
            ("no lengths", _cu([], []), CU_Q),
        )
    ),
]

NOT_BUILT = [
    Case(
        "more sequences than supported",
        DENSE,
        _cu([0] * 1_100_000, [0] * 1_100_000),
        CU_Q,
        UNIMPLEMENTED,
    ),
    *(
        Case(
            f"a bias of {types_pb2.DataType.Name(dtype)}",
            PACKED,
            {
                "spec.dtype": dtype,
                "inputs.qkv": zeros(2, 5, 3, 4, 4, dtype=dtype),
                "spec.bias_kind": PRE_SCALE,
                "bias": zeros(1, 1, 5, 5, dtype=dtype),
            },
            "spec.bias_kind",
            UNIMPLEMENTED,
        )
        for dtype in (E4M3, E5M2)
    ),
    *(
        Case(what, PAGED, edits, field, UNIMPLEMENTED, in_plan=False)
        for what, edits, field in (
            (
                "a resident Q",
                {"inputs.q.data": None, "inputs.q.handle": HANDLE},
                "inputs.q.handle",
            ),
            (
                "Q in shared memory",
                {
                    "inputs.q.data": None,
                    "inputs.q.shared_memory": _shared(region="r", byte_size=4 * 160),
                },
                "inputs.q.shared_memory",
            ),
            (
                "a resident page table",
                {f"{TABLE_K}.data": None, f"{TABLE_K}.handle": HANDLE},
                f"{TABLE_K}.handle",
            ),
            ("an output that stays", {"out_placement.resident": LEASE}, "out_placement.resident"),
            (
                "an output to shared memory",
                {"out_placement.shared_memory": _shared(region="r", byte_size=4 * 240)},
                "out_placement.shared_memory",
            ),
            (
                "an LSE that stays",
                {"return_lse": True, "lse_placement.resident": LEASE},
                "lse_placement.resident",
            ),
        )
    ),
]

ALL = {
    "shapes": SHAPES,
    "sizes": SIZES,
    "sources": SOURCES,
    "types": TYPES,
    "sequences": SEQUENCES,
    "pages": PAGES,
    "features": FEATURES,
    "placements": PLACEMENTS,
    "strided": STRIDED,
    "not built": NOT_BUILT,
}
