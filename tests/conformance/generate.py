"""Writes the golden file of the conformance suite: inputs and float64 answers of ~2,500 problems.

usage: generate.py OUTPUT

Inputs and the gradient of O have unit variance and are rounded to the dtype before the answer is
computed. Gradients go with FLOAT32 and, by turns, with FLOAT16 or BFLOAT16.

File: little-endian, no padding. "ATGOLD02", int64 count, then for each problem
  char group[32], name[96]                        zero-padded
  int64 dtype (1 FLOAT32, 2 FLOAT16, 3 BFLOAT16), b, h, g, d_qk, d_v
  int64 s_q, s_kv                                 axes of a dense buffer, >= every length
  int64 t_q, t_kv                                 rows of a token buffer
  int64 has_lengths                               0: every sequence fills its dense axis
  int64 has_gaps                                  1: rows are not the running sums of the lengths
  int64 causal, alignment                         0 none, 1 top-left, 2 bottom-right
  int64 left, right                               -1: unlimited
  int64 bias_kind                                 0 none, 1 pre-scale, 2 post-scale, 3 ALiBi
  int64 bias_dims[4]                              0: no bias
  int64 alibi_first, alibi_total                  0 of 0: absent
  int64 softmax_kind                              0 vanilla, 1 off by one, 2 learnable
  int64 seed, offset                              of dropout
  int64 has_gradients
  float64 scale, softcap                          NaN: absent
  float64 drop_probability                        0: no dropout
  int64 q_len[b], kv_len[b], q_row[b+1], kv_row[b+1]
  dtype q[sum q_len, h, d_qk], k[sum kv_len, g, d_qk], v[sum kv_len, g, d_v]
  dtype bias[bias_dims]                           NaN in cells that no pair of a query and a key uses
  float32 softmax_offset[h]                       learnable only
  answer out[sum q_len, h, d_v]
  float32 lse[sum q_len, h]
and with gradients
  dtype d_out[sum q_len, h, d_v]
  answer dq, dk, dv, d_bias                       like q, k, v, bias
  float32 d_softmax_offset[h]                     learnable only
An answer is float32, or float16 with the 16-bit dtypes. NaN: nothing contributes, so that it must be
exactly 0.
"""

import itertools
import struct
import sys
import zlib

import numpy as np

import dropout
import oracle
from cases import Case, all_cases

DTYPES = {"f32": 1, "f16": 2, "bf16": 3}
ANCHORS = {"none": 0, "top_left": 1, "bottom_right": 2}
BIASES = {"none": 0, "pre_scale": 1, "post_scale": 2, "alibi": 3}


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


class Inputs:
    """What a case's problem reads: each tensor as bytes and in float64."""

    def __init__(self, case: Case, dtype: str):
        (h, g), (d_qk, d_v) = case.heads, case.dims
        rng = np.random.default_rng(zlib.crc32(f"{case.group}/{case.name}.{dtype}".encode()))
        queries, keys = sum(case.q.lens), sum(case.kv.lens)
        draw = lambda *shape: round_to(dtype, rng.standard_normal(shape))
        self.raw_qkv, self.qkv = zip(draw(queries, h, d_qk), draw(keys, g, d_qk), draw(keys, g, d_v))
        self.raw_d_out, self.d_out = draw(queries, h, d_v)
        self.raw_bias, self.bias = b"", None
        if case.bias_kind in ("pre_scale", "post_scale"):
            values = case.bias_mean + rng.standard_normal(case.bias_dims())
            bias = np.where(bias_use(case), values, np.nan)
            if case.bias_rows_masked:
                bias[..., ::3, :] -= np.inf
                bias[..., 1] -= np.inf
            self.raw_bias, self.bias = round_to(dtype, bias)

    def bias_of(self, case: Case, i: int):
        """[h, Lq, Lkv] of sequence i."""
        if self.bias is None:
            return None
        b, h, rows, keys = self.bias.shape
        shape = len(case.q.lens), case.heads[0], case.q.axis(), keys
        return np.broadcast_to(self.bias, shape)[i, :, : case.q.lens[i], : case.kv.lens[i]]


def bias_use(case: Case) -> np.ndarray:
    """Which cells of the bias some pair of a query and a key uses: bool [bias_dims]."""
    b, h, rows, keys = case.bias_dims()
    use = np.zeros((b, h, rows, keys), bool)
    for i, (q_len, kv_len) in enumerate(zip(case.q.lens, case.kv.lens)):
        for row in range(q_len):
            seen = case.mask.visible(row, q_len, kv_len)
            use[min(i, b - 1), :, min(row, rows - 1), seen.start : seen.stop] = True
    return use


def sum_bias(case: Case, gradients: list) -> np.ndarray:
    """[h, Lq, Lkv] of each sequence -> [bias_dims], summed over the axes along which it is broadcast."""
    b, h, rows, keys = case.bias_dims()
    total = np.full((b, h, rows, keys), np.nan)
    for i, gradient in enumerate(gradients):
        for n, row in itertools.product(range(gradient.shape[0]), range(gradient.shape[1])):
            cells = total[min(i, b - 1), min(n, h - 1), min(row, rows - 1), : gradient.shape[2]]
            cells[:] = np.where(np.isnan(gradient[n, row]), cells, np.nan_to_num(cells) + gradient[n, row])
    return total


def answers(case: Case, inputs: Inputs, with_gradients: bool) -> list:
    """One for each sequence."""
    (h, g), (d_qk, d_v) = case.heads, case.dims
    sinks = (0.0,) * h if case.sinks == "off_by_one" else case.sinks
    slopes = oracle.alibi_slopes(*reversed(case.alibi or (0, h)), h) if case.bias_kind == "alibi" else ()
    drop, *state = case.dropout or (0.0,)
    problem = oracle.Problem(
        h, g, d_qk, d_v, case.mask, case.scale, case.softcap, case.bias_kind, slopes, sinks, drop
    )
    cuts = [np.cumsum(side.lens)[:-1] for side in (case.q, case.kv, case.kv, case.q)]
    split = [np.split(x, cut) for x, cut in zip((*inputs.qkv, inputs.d_out), cuts)]
    result = []
    for i, (q, k, v, d_out) in enumerate(zip(*split)):
        sequence = oracle.Sequence(q, k, v, d_out if with_gradients else None, inputs.bias_of(case, i))
        if drop:
            masks = [dropout.keep_mask(drop, *state, i, n, len(q), len(k)) for n in range(h)]
            sequence.keep = np.array(masks)
        result.append(oracle.attend(problem, sequence))
    return result


def header(case: Case, dtype: str, with_gradients: bool) -> bytes:
    mask = case.mask
    has_bias = case.bias_kind in ("pre_scale", "post_scale")
    drop, seed, offset = case.dropout or (0.0, 0, 0)
    integers = (
        (DTYPES[dtype], len(case.q.lens), *case.heads, *case.dims)
        + (case.q.axis(), case.kv.axis(), case.q.tokens(), case.kv.tokens())
        + (case.has_lengths(), case.q.rows is not None or case.kv.rows is not None)
        + (ANCHORS[mask.causal], ANCHORS[mask.alignment])
        + tuple(-1 if bound is None else bound for bound in (mask.left, mask.right))
        + (BIASES[case.bias_kind], *(case.bias_dims() if has_bias else (0,) * 4))
        + (case.alibi or (0, 0))
        + ({type(None): 0, str: 1, tuple: 2}[type(case.sinks)], seed, offset, with_gradients)
    )
    numbers = tuple(np.nan if x is None else x for x in (case.scale, case.softcap))
    names = case.group.encode(), f"{case.name}.{dtype}".encode()
    return struct.pack("<32s96s27q3d", *names, *integers, *numbers, drop)


def record(case: Case, dtype: str, with_gradients: bool) -> bytes:
    """One problem of the file."""
    inputs = Inputs(case, dtype)
    found = answers(case, inputs, with_gradients)
    number = "<f4" if dtype == "f32" else "<f2"
    learnable = isinstance(case.sinks, tuple)
    join = lambda name, kind=number: b"".join(getattr(a, name).astype(kind).tobytes() for a in found)
    geometry = (*case.q.lens, *case.kv.lens, *case.q.starts(), *case.kv.starts())
    parts = [header(case, dtype, with_gradients), np.array(geometry, "<i8").tobytes()]
    parts += [*inputs.raw_qkv, inputs.raw_bias]
    parts += [np.array(case.sinks, "<f4").tobytes() if learnable else b""]
    parts += [join("out"), join("lse", "<f4")]
    if with_gradients:
        parts += [inputs.raw_d_out, join("dq"), join("dk"), join("dv")]
        if inputs.bias is not None:
            parts += [sum_bias(case, [a.d_bias for a in found]).astype(number).tobytes()]
        if learnable:
            parts += [np.sum([a.d_sinks for a in found], axis=0).astype("<f4").tobytes()]
    return b"".join(parts)


def has_gradients(case: Case, index: int, dtype: str) -> bool:
    return case.has_gradients and dtype in ("f32", ("f16", "bf16")[index % 2])


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__.splitlines()[2], file=sys.stderr)
        return 2
    cases = all_cases()
    with open(sys.argv[1], "wb") as file:
        file.write(b"ATGOLD02" + struct.pack("<q", len(cases) * len(DTYPES)))
        for (index, case), dtype in itertools.product(enumerate(cases), DTYPES):
            file.write(record(case, dtype, has_gradients(case, index, dtype)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
