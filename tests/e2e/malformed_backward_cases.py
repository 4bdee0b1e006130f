"""Backward requests with one thing wrong, and the field that the refusal must name.

Those of malformed_cases that are wrong in Backward too, and such as only Backward can have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import grpc
import malformed_cases
from malformed_cases import (
    DENSE,
    E4M3,
    HALF,
    HANDLE,
    LEASE,
    NO_LEASE,
    PAGED,
    RAGGED,
    VALUES,
    edit,
)
from sample_requests import LAYOUTS, backward_of, sample, zeros

from attnd.v1 import attention_pb2, types_pb2

INVALID, UNIMPLEMENTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED
INT32 = types_pb2.DATA_TYPE_INT32
PACKED, STRIDED = "BS3HD", "STRIDED"


@dataclasses.dataclass(frozen=True)
class BackwardCase:
    """One mistake: as malformed_cases.Case, with edits of the Backward request of a sample."""

    what: str
    layout: str
    edits: Mapping[str, Any]
    field: str
    code: grpc.StatusCode = INVALID
    in_plan: bool = False

    def request(self) -> attention_pb2.BackwardRequest:
        request = backward_of(sample(self.layout))
        for path, value in self.edits.items():
            edit(request, path, value)
        return request


def _shared_cases() -> Iterator[BackwardCase]:
    """Mistakes of malformed_cases in fields that Backward has as well."""
    fields = attention_pb2.BackwardRequest.DESCRIPTOR.fields_by_name
    for cases in malformed_cases.ALL.values():
        for case in cases:
            if case.in_backward and all(path.split(".")[0] in fields for path in case.edits):
                yield BackwardCase(
                    case.what, case.layout, case.edits, case.field, case.code, case.in_plan
                )


# The samples' O: BS3HD [2, 5, 4, 4], BSHD_BSHD_BSHD [2, 5, 4, 6], THD_THD_THD [5, 4, 6].
RESULTS = [
    *(BackwardCase(f"no {name}", DENSE, {name: None}, name) for name in ("out", "lse", "d_out")),
    *(
        BackwardCase(what, layout, {name: tensor}, name)
        for what, layout, name, tensor in (
            ("O of Q's head dim", DENSE, "out", zeros(2, 5, 4, 4)),
            ("O of rank 3", DENSE, "out", zeros(10, 4, 6)),
            ("O of another batch", DENSE, "out", zeros(1, 5, 4, 6)),
            ("O of the KV heads", DENSE, "out", zeros(2, 5, 2, 6)),
            ("O of the keys' length", DENSE, "out", zeros(2, 7, 4, 6)),
            ("O as SBHD", PACKED, "out", zeros(5, 2, 4, 4)),
            ("O as BSHD", "BHSD_BHSD_BHSD", "out", zeros(2, 5, 4, 6)),
            ("O packed as its input", PACKED, "out", zeros(2, 5, 3, 4, 4)),
            ("O of fewer tokens", RAGGED, "out", zeros(4, 4, 6)),
            ("a scalar O", DENSE, "out", zeros()),
            ("LSE [b, s, h]", DENSE, "lse", zeros(2, 5, 4)),
            ("LSE of the KV heads", DENSE, "lse", zeros(2, 2, 5)),
            ("LSE with a last 1", DENSE, "lse", zeros(2, 4, 5, 1)),
            ("LSE [h, t]", RAGGED, "lse", zeros(4, 5)),
            ("LSE [b, h, s] of ragged queries", RAGGED, "lse", zeros(2, 4, 3)),
            ("LSE [t, h] of dense queries", PACKED, "lse", zeros(10, 4)),
            ("dO of Q's head dim", DENSE, "d_out", zeros(2, 5, 4, 4)),
            ("dO of one row", DENSE, "d_out", zeros(1, 1, 1, 6)),
            ("dO of more tokens", RAGGED, "d_out", zeros(6, 4, 6)),
        )
    ),
    *(
        BackwardCase(what, PACKED, edits, field)
        for what, edits, field in (
            ("O of FLOAT16", {"out": zeros(2, 5, 4, 4, dtype=HALF)}, "out.dtype"),
            ("O of INT32", {"out.dtype": INT32}, "out.dtype"),
            ("O of an unknown dtype", {"out.dtype": 7}, "out.dtype"),
            ("LSE of FLOAT16", {"lse": zeros(2, 4, 5, dtype=HALF)}, "lse.dtype"),
            ("LSE without dtype", {"lse.dtype": 0}, "lse.dtype"),
            ("dO of FLOAT16", {"d_out": zeros(2, 5, 4, 4, dtype=HALF)}, "d_out.dtype"),
            (
                "O of FLOAT32 and dO of FLOAT16",
                {
                    "spec.dtype": HALF,
                    "inputs.qkv": zeros(2, 5, 3, 4, 4, dtype=HALF),
                    "d_out": zeros(2, 5, 4, 4, dtype=HALF),
                },
                "d_out.dtype",
            ),
            ("O of negative rows", {"out.shape": [2, -5, 4, 4]}, "out"),
            ("LSE past 2^63 bytes", {"lse.shape": [2**62, 2**62]}, "lse"),
            ("short O", {"out.data": bytes(639)}, "out.data"),
            ("long LSE", {"lse.data": bytes(161)}, "lse.data"),
            ("empty dO", {"d_out.data": b""}, "d_out.data"),
            ("dO without a source", {"d_out.data": None}, "d_out"),
            ("LSE with two sources", {"lse.values": [0] * 40}, "lse.values"),
            ("O with a handle too", {"out.handle": HANDLE}, "out.handle"),
            (
                "gradients too large for values",
                {
                    "inputs.qkv": zeros(2, 50, 3, 4, 4),
                    "out": zeros(2, 50, 4, 4),
                    "lse": zeros(2, 4, 50),
                    "d_out": zeros(2, 50, 4, 4),
                    "grads_placement.values": VALUES,
                },
                "grads_placement.values",
            ),
            (
                "gradients leased for 0 s",
                {"grads_placement.resident": NO_LEASE},
                "grads_placement.resident.seconds",
            ),
            (
                "gradients to no region",
                {"grads_placement.shared_memory": types_pb2.SharedMemoryRange(byte_size=1)},
                "grads_placement.shared_memory.region",
            ),
        )
    ),
]

_FP8 = {
    "spec.dtype": E4M3,
    "inputs.qkv": zeros(2, 5, 3, 4, 4, dtype=E4M3),
    "out": zeros(2, 5, 4, 4, dtype=E4M3),
    "d_out": zeros(2, 5, 4, 4, dtype=E4M3),
}
SCALES = [
    BackwardCase(what, PACKED, edits | {"fp8": types_pb2.Fp8Scales(**scales)}, field)
    for what, edits, scales, field in (
        ("scales of FLOAT32", {}, {}, "fp8"),
        ("a negative scale", _FP8, {"scale_d_q": -1}, "fp8.scale_d_q"),
        ("a scale that forward has not", _FP8, {"descale_k": 2}, "fp8.descale_k"),
    )
]

# All that a context stands for.
_RETAINED = ("spec", "sequences", "inputs", "out", "lse", "bias", "softmax_offset")
_ONLY_D_OUT = dict.fromkeys(_RETAINED)

CONTEXTS = [
    BackwardCase("a context and all the rest", PACKED, {"context": HANDLE}, "spec"),
    *(
        BackwardCase(
            f"a context and {name}", PACKED, _ONLY_D_OUT | {"context": HANDLE, name: value}, name
        )
        for name, value in (
            ("spec", types_pb2.AttentionSpec()),
            ("sequences", types_pb2.Sequences(cu_seqlens_q=[0, 5, 10])),
            ("inputs", types_pb2.QkvBuffers(qkv=zeros(2, 5, 3, 4, 4))),
            *((name, zeros(4)) for name in ("out", "lse", "bias", "softmax_offset")),
        )
    ),
    BackwardCase(
        "a context without a name",
        PACKED,
        _ONLY_D_OUT | {"context": types_pb2.Handle(generation=1)},
        "context.id",
    ),
    *(
        BackwardCase(
            f"the context {name[:9]!r}",
            PACKED,
            _ONLY_D_OUT | {"context": types_pb2.Handle(id=name)},
            "context",
            grpc.StatusCode.NOT_FOUND,
        )
        for name in ("h", "-", "0-0", "x" * 100_000, "\N{SNOWMAN}")
    ),
]

NOT_BUILT = [
    BackwardCase(
        "gradients that stay",
        PACKED,
        {"grads_placement.resident": LEASE},
        "grads_placement.resident",
        UNIMPLEMENTED,
    ),
    BackwardCase(
        "a resident O",
        PACKED,
        {"out.data": None, "out.handle": HANDLE},
        "out.handle",
        UNIMPLEMENTED,
    ),
    *(
        BackwardCase("pages", layout, {}, "spec.layout", UNIMPLEMENTED, in_plan=True)
        for layout in LAYOUTS
        if layout.startswith("PAGED_KV_")
    ),
    *(
        BackwardCase(what, STRIDED, edits, "spec.views", UNIMPLEMENTED, in_plan=True)
        for what, edits in (
            ("K is V", {"spec.views.v.byte_offset": 4 * 4 * 4}),
            ("K overlaps Q", {"spec.views.k.byte_offset": 4 * 4 * 3}),
            ("one key for all heads", {"spec.views.k.strides": [32, 0, 1]}),
        )
    ),
]

ALL = {
    "shared": list(_shared_cases()),
    "results": RESULTS,
    "scales": SCALES,
    "contexts": CONTEXTS,
    "not built": NOT_BUILT,
}
