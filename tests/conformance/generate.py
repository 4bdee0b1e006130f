"""Writes the golden file of the conformance suite: inputs and float64 answers of ~1,700 problems.

usage: generate.py OUTPUT

A problem is logical: sequences of q, k, v without any layout. "self" problems have the same lengths
and positions on both sides (what a layout with a packed Q needs), "cross" problems do not. Inputs
have unit variance and are rounded to the dtype before the answer is computed.

File: little-endian, no padding. "ATGOLD01", int64 count, then for each problem
  char group[32], name[96]                        zero-padded
  int64 dtype (1 FLOAT32, 2 FLOAT16, 3 BFLOAT16), b, h, g, d_qk, d_v
  int64 s_q, s_kv                                 axes of a dense buffer, >= every length
  int64 t_q, t_kv                                 rows of a token buffer
  int64 has_lengths                               0: every sequence fills its dense axis
  int64 has_gaps                                  1: rows are not the running sums of the lengths
  int64 causal, alignment                         0 none, 1 top-left, 2 bottom-right
  int64 left, right                               -1: unlimited
  float64 scale, softcap                          NaN: absent
  int64 q_len[b], kv_len[b], q_row[b+1], kv_row[b+1]
  dtype q[sum q_len, h, d_qk], k[sum kv_len, g, d_qk], v[sum kv_len, g, d_v]
  float64 out[sum q_len, h, d_v], lse[sum q_len, h]
"""

import dataclasses
import itertools
import struct
import sys
import zlib

import numpy as np

import oracle
from oracle import Mask

DTYPES = {"f32": 1, "f16": 2, "bf16": 3}
ANCHORS = {"none": 0, "top_left": 1, "bottom_right": 2}


@dataclasses.dataclass(frozen=True)
class Side:
    """Lengths of one side. rows: where sequences start (b + 1); tail: rows after the last one."""

    lens: tuple
    pad: int = 0  # rows of the dense axis beyond the longest sequence
    rows: tuple | None = None
    tail: int = 0

    def axis(self) -> int:
        return max(max(self.lens) + self.pad, 1)

    def starts(self) -> list:
        return list(self.rows) if self.rows else [sum(self.lens[:i]) for i in range(len(self.lens) + 1)]

    def tokens(self) -> int:
        return self.starts()[-1] + self.tail


@dataclasses.dataclass(frozen=True)
class Case:
    group: str
    name: str
    q: Side
    kv: Side
    heads: tuple  # h, g
    dims: tuple  # d_qk, d_v
    mask: Mask = Mask()
    scale: float | None = None
    softcap: float | None = None

    def has_lengths(self) -> bool:
        return any(n != side.axis() for side in (self.q, self.kv) for n in side.lens)


MASKS = {
    "none": [("none", Mask())],
    "causal_tl": [("causal_tl", Mask(causal="top_left"))],
    "causal_br": [("causal_br", Mask(causal="bottom_right"))],
    "window": [
        ("window_tl", Mask(left=3, right=2, alignment="top_left")),
        ("window_br", Mask(left=2, right=3, alignment="bottom_right")),
        ("window_causal_tl", Mask(causal="top_left", left=4)),
        ("window_causal_br", Mask(causal="bottom_right", left=4)),
    ],
}
HEADS = {"mha": (3, 3), "gqa": (4, 2), "mqa": (4, 1)}

# name -> (self side, cross q side, cross kv side)
LENGTHS = {
    "full": (Side((11, 11, 11)), Side((9, 9, 9)), Side((13, 13, 13))),
    "full_wide_q": (Side((6, 6)), Side((13, 13)), Side((8, 8))),
    "lengths": (Side((5, 12, 1), pad=2), Side((5, 12, 1), pad=2), Side((9, 2, 7), pad=1)),
    "gaps": (
        Side((4, 7, 3), pad=1, rows=(2, 8, 15, 20), tail=3),
        Side((4, 7, 3), pad=1, rows=(2, 8, 15, 20), tail=3),
        Side((6, 3, 8), rows=(0, 9, 12, 22), tail=2),
    ),
    "zero_first": (Side((0, 6, 4), tail=2), Side((0, 6, 4), tail=2), Side((5, 0, 7), tail=1)),
    "zero_middle": (Side((6, 0, 4), pad=1), Side((6, 0, 4), pad=1), Side((7, 5, 0))),
    "zero_last": (
        Side((6, 4, 0), rows=(1, 7, 13, 13)),
        Side((6, 4, 0), rows=(1, 7, 13, 13)),
        Side((0, 3, 7), rows=(3, 3, 8, 17)),
    ),
}


def grid():
    """Mask x heads x dims x lengths x {self, cross}."""
    for group, masks in MASKS.items():
        for (mask_name, mask), (head_name, heads), (length_name, sides) in itertools.product(
            masks, HEADS.items(), LENGTHS.items()
        ):
            both, q, kv = sides
            unlike = (24, 8) if head_name == "mha" else (8, 24)
            name = f"{mask_name}.{head_name}.{length_name}"
            yield Case(group, f"{name}.self", both, both, heads, (16, 16), mask)
            yield Case(group, f"{name}.cross", q, kv, heads, (16, 16), mask)
            yield Case(group, f"{name}.cross.d_v", q, kv, heads, unlike, mask)


def head_dims():
    causal = Mask(causal="bottom_right")
    for d in (1, 3, 8, 40, 64, 128, 256):
        both = Side((17, 5), pad=1)
        yield Case("head_dim", f"{d}.self", both, both, (2, 2), (d, d), causal)
        yield Case("head_dim", f"{d}.cross", Side((5, 18)), Side((33, 9)), (2, 1), (d, 3 * d // 2 + 1), causal)
        yield Case("head_dim", f"{d}.decode", Side((1,)), Side((50,)), (2, 1), (d, d))


def scales():
    both, q, kv = LENGTHS["lengths"]
    masks = {"none": Mask(), "causal_br": Mask(causal="bottom_right"), "window": MASKS["window"][0][1]}
    for (mask_name, mask), softcap in itertools.product(masks.items(), (0.8, 30.0)):
        name = f"{mask_name}.cap{softcap}"
        yield Case("softcap", f"{name}.self", both, both, (3, 3), (16, 16), mask, 1.0, softcap)
        yield Case("softcap", f"{name}.cross", q, kv, (4, 2), (16, 8), mask, None, softcap)
    for (mask_name, mask), scale in itertools.product(masks.items(), (0.0, -0.7, 0.9)):
        name = f"{mask_name}.{scale}"
        yield Case("scale", f"{name}.self", both, both, (3, 3), (16, 16), mask, scale)
        yield Case("scale", f"{name}.cross", q, kv, (4, 1), (16, 8), mask, scale)
    # Rows whose LSE is far below zero, where exp(-LSE) would overflow a float.
    yield Case("scale", "far_negative", both, both, (2, 2), (64, 64), Mask(left=0, right=0), 6.0)


def windows():
    """One-sided, diagonal and never-ending windows."""
    both, q, kv = LENGTHS["lengths"]
    for name, mask in {
        "diagonal_tl": Mask(left=0, right=0, alignment="top_left"),
        "diagonal_br": Mask(left=0, right=0, alignment="bottom_right"),
        "left_only": Mask(left=1, alignment="bottom_right"),
        "right_only": Mask(right=1, alignment="top_left"),
        "endless": Mask(left=2**62, right=2**62, alignment="bottom_right"),
        "causal_right_ignored": Mask(causal="top_left", left=3, right=5),
    }.items():
        yield Case("window", f"{name}.self", both, both, (2, 2), (8, 8), mask)
        yield Case("window", f"{name}.cross", q, kv, (4, 2), (8, 8), mask)


def tiles():
    """Lengths on both sides of every likely tile boundary."""
    masks = {
        "none": Mask(),
        "causal_tl": Mask(causal="top_left"),
        "causal_br": Mask(causal="bottom_right"),
        "window": Mask(left=40, right=7, alignment="bottom_right"),
    }
    ladders = ((1, 2, 3, 7, 8), (9, 15, 16, 17, 31), (32, 33, 47, 48, 49), (63, 64, 65), (127, 129), (257,))
    for (mask_name, mask), lens in itertools.product(masks.items(), ladders):
        name = f"{mask_name}.{'_'.join(map(str, lens))}"
        heads = 2 if max(lens) < 100 else 1
        yield Case("tiles", f"{name}.self", Side(lens), Side(lens), (heads, heads), (8, 8), mask)
        shifted = tuple(n + 1 + 7 * i for i, n in enumerate(reversed(lens)))
        yield Case("tiles", f"{name}.cross", Side(lens), Side(shifted), (heads, 1), (8, 4), mask)
    yield Case("tiles", "300.self", Side((300,)), Side((300,)), (1, 1), (8, 8), masks["causal_br"])
    yield Case("tiles", "600.self", Side((600,)), Side((600,)), (1, 1), (8, 8), masks["window"])
    yield Case("tiles", "600x70", Side((600,)), Side((70,)), (2, 1), (8, 8), masks["causal_br"])
    yield Case("tiles", "70x600", Side((70,)), Side((600,)), (2, 1), (8, 8), masks["causal_tl"])


def shapes():
    """Batches of 1 to 5, decode, sides without any row."""
    for b in range(1, 6):
        lens = tuple(3 + 2 * i for i in range(b))
        yield Case("shapes", f"batch{b}.self", Side(lens), Side(lens), (2, 2), (8, 8), Mask(causal="top_left"))
        yield Case("shapes", f"batch{b}.cross", Side(lens), Side(lens[::-1]), (2, 1), (8, 4))
    causal = Mask(causal="bottom_right")
    ones = Side((1,) * 5)
    yield Case("shapes", "decode.gqa", ones, Side((1, 17, 64, 130, 300)), (8, 2), (16, 16), causal)
    yield Case("shapes", "decode.mha", ones, Side((5, 1, 0, 33, 18)), (2, 2), (8, 8), causal)
    yield Case("shapes", "decode.split", Side((1,)), Side((1000,)), (2, 2), (8, 8), causal)
    yield Case("shapes", "few_rows", Side((3,)), Side((700,)), (2, 1), (8, 8), causal)
    yield Case("shapes", "single_token", Side((1,)), Side((1,)), (1, 1), (4, 4), causal)
    for name, mask in {"none": Mask(), "causal": causal}.items():
        yield Case("shapes", f"no_keys.{name}", Side((3, 5)), Side((0, 0)), (2, 1), (8, 8), mask)
        yield Case("shapes", f"no_keys_tail.{name}", Side((3, 5)), Side((0, 0), pad=3, tail=2), (2, 2), (8, 8), mask)
        yield Case("shapes", f"no_queries.{name}", Side((0, 0), pad=2, tail=1), Side((4, 2)), (2, 2), (8, 8), mask)
    yield Case("shapes", "nothing", Side((0, 0)), Side((0, 0)), (2, 2), (8, 8))


def round_to(dtype: str, x: np.ndarray):
    """-> (bytes of x in dtype, the same values in float64)."""
    if dtype == "f16":
        half = x.astype("<f2")
        return half.tobytes(), half.astype(np.float64)
    bits = x.astype("<f4").view("<u4")
    if dtype == "bf16":  # Round to nearest even; normal numbers only, so nothing overflows.
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
        return (bits >> 16).astype("<u2").tobytes(), bits.view("<f4").astype(np.float64)
    return bits.tobytes(), bits.view("<f4").astype(np.float64)


def record(case: Case, dtype: str) -> bytes:
    """One problem of the file."""
    (h, g), (d_qk, d_v) = case.heads, case.dims
    name = f"{case.name}.{dtype}"
    rng = np.random.default_rng(zlib.crc32(f"{case.group}/{name}".encode()))
    tensors = [
        round_to(dtype, rng.standard_normal((sum(side.lens), n, d)))
        for side, n, d in ((case.q, h, d_qk), (case.kv, g, d_qk), (case.kv, g, d_v))
    ]
    problem = oracle.Problem(h, g, d_qk, d_v, case.mask, case.scale, case.softcap)
    cuts = [np.cumsum(side.lens)[:-1] for side in (case.q, case.kv, case.kv)]
    split = [np.split(x, cut) for (_, x), cut in zip(tensors, cuts)]
    answers = [oracle.attend(problem, *qkv) for qkv in zip(*split)]
    mask = case.mask
    header = (
        (DTYPES[dtype], len(case.q.lens), h, g, d_qk, d_v)
        + (case.q.axis(), case.kv.axis(), case.q.tokens(), case.kv.tokens())
        + (case.has_lengths(), case.q.rows is not None or case.kv.rows is not None)
        + (ANCHORS[mask.causal], ANCHORS[mask.alignment])
        + tuple(-1 if bound is None else bound for bound in (mask.left, mask.right))
    )
    numbers = tuple(np.nan if x is None else x for x in (case.scale, case.softcap))
    geometry = (*case.q.lens, *case.kv.lens, *case.q.starts(), *case.kv.starts())
    return b"".join(
        [struct.pack("<32s96s16q2d", case.group.encode(), name.encode(), *header, *numbers)]
        + [np.array(geometry, "<i8").tobytes()]
        + [raw for raw, _ in tensors]
        + [out.astype("<f8").tobytes() for out, _ in answers]
        + [lse.astype("<f8").tobytes() for _, lse in answers]
    )


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__.splitlines()[2], file=sys.stderr)
        return 2
    cases = [*grid(), *head_dims(), *scales(), *windows(), *tiles(), *shapes()]
    with open(sys.argv[1], "wb") as file:
        file.write(b"ATGOLD01" + struct.pack("<q", len(cases) * len(DTYPES)))
        for case, dtype in itertools.product(cases, DTYPES):
            file.write(record(case, dtype))
    return 0


if __name__ == "__main__":
    sys.exit(main())
