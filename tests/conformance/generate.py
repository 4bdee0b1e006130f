"""Writes the golden file of the conformance suite: inputs and float64 answers of ~2,600 problems.

usage: generate.py OUTPUT

Inputs and the gradient of O have unit variance and are rounded to the dtype before the answer is
computed. Gradients go with FLOAT32 and, by turns, with FLOAT16 or BFLOAT16.

File: little-endian, no padding. "ATGOLD04", int64 count, then for each problem
  char group[32], name[96]                        zero-padded
  int64 dtype (1 FLOAT32, 2 FLOAT16, 3 BFLOAT16, 4 E4M3, 5 E5M2), b, h, g, d_qk, d_v
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
  float64 largest_logit                           in absolute value
  int64 q_len[b], kv_len[b], q_row[b+1], kv_row[b+1]
with an FP8 dtype
  float32 scales[13]                              fields of Fp8Scales
  float32 amax[6]                                 fields of Fp8Amax
and with all
  dtype q[sum q_len, h, d_qk], k[sum kv_len, g, d_qk], v[sum kv_len, g, d_v]
  dtype bias[bias_dims]                           NaN in cells that no pair of a query and a key uses
  float32 softmax_offset[h]                       learnable only
  answer out[sum q_len, h, d_v]
  float32 lse[sum q_len, h]
and with gradients
  dtype d_out[sum q_len, h, d_v]
  answer dq, dk, dv, d_bias                       like q, k, v, bias
  float32 d_softmax_offset[h]                     learnable only
An answer is float32, or float16 with the 16-bit dtypes, and with FP8 float32 for O and float16 for
gradients; it is the real value, before any scale. NaN: nothing contributes, so that it must be exactly
0. Inputs and d_out of FP8 are what is stored, and their real values have unit variance.
"""

import itertools
import struct
import sys
import zlib

import numpy as np

import dropout
import oracle
from cases import Case, all_cases

DTYPES = {"f32": 1, "f16": 2, "bf16": 3, "e4m3": 4, "e5m2": 5}
WIDE, NARROW = ("f32", "f16", "bf16"), ("e4m3", "e5m2")
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


def float8_numbers(dtype: str) -> np.ndarray:
    """The numbers of codes 0, 1, ... up to the largest, which are those from 0 up."""
    mantissa_bits, bias, count = {"e4m3": (3, 7, 127), "e5m2": (2, 15, 124)}[dtype]
    codes = np.arange(count)
    exponent, mantissa = codes >> mantissa_bits, codes % (1 << mantissa_bits)
    fraction = mantissa / (1 << mantissa_bits) + (exponent > 0)
    return np.ldexp(fraction, np.maximum(exponent, 1) - bias)


def round_to_float8(dtype: str, x: np.ndarray):
    """As round_to. To nearest, ties to the even code; nothing is beyond the largest number."""
    numbers = float8_numbers(dtype)
    magnitude = np.minimum(np.abs(x), numbers[-1])
    below = np.minimum(np.searchsorted(numbers, magnitude, side="right") - 1, len(numbers) - 2)
    middle = (numbers[below] + numbers[below + 1]) / 2
    up = (magnitude > middle) | ((magnitude == middle) & (below % 2 == 1))
    code = below + up
    stored = (code | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)
    return stored.tobytes(), np.copysign(numbers[code], x)


def descale_of(dtype: str, largest: float) -> np.float32:
    """The scale of a tensor that uses the dtype's range for real numbers up to `largest`."""
    return np.float32(largest / float8_numbers(dtype)[-1]) if dtype in NARROW else np.float32(1)


class Inputs:
    """What a case's problem reads: each tensor as bytes and in float64."""

    def __init__(self, case: Case, dtype: str):
        (h, g), (d_qk, d_v) = case.heads, case.dims
        rng = np.random.default_rng(zlib.crc32(f"{case.group}/{case.name}.{dtype}".encode()))
        queries, keys = sum(case.q.lens), sum(case.kv.lens)
        self.descales = [descale_of(dtype, largest) for largest in (4.5, 5.0, 6.5, 5.5)]
        shapes = (queries, h, d_qk), (keys, g, d_qk), (keys, g, d_v), (queries, h, d_v)
        tensors = [rng.standard_normal(shape) for shape in shapes]
        if case.level != 0:
            scale = case.dims[0] ** -0.5 if case.scale is None else case.scale
            part = max(1.0, abs(case.level) / scale / 60000) if dtype == "f16" else 1.0
            tensors[0][..., 0], tensors[1][..., 0] = part, case.level / scale / part
        if case.bias_hides:
            hidden = hidden_keys(case)
            tensors[1][hidden], tensors[2][hidden] = np.nan, np.inf
        drawn = []
        for tensor, descale in zip(tensors, self.descales):
            if dtype in NARROW:
                raw, stored = round_to_float8(dtype, tensor / descale)
                drawn.append((raw, stored * np.float64(descale)))
            else:
                drawn.append(round_to(dtype, tensor))
        *self.raw_qkv, self.raw_d_out = (raw for raw, _ in drawn)
        *self.qkv, self.d_out = (real for _, real in drawn)
        self.raw_bias, self.bias = b"", None
        if case.bias_kind in ("pre_scale", "post_scale"):
            values = case.bias_mean + rng.standard_normal(case.bias_dims())
            bias = np.where(bias_use(case), values, np.nan)
            if case.bias_lowest:
                lowest = {"f32": np.finfo("f4").min, "f16": np.finfo("f2").min, "bf16": -(2.0**128 - 2.0**120)}[dtype]
                used = ~np.isnan(bias)
                bias[..., ::3, :] = bias[..., :2] = lowest
                bias[~used] = np.nan
            if case.bias_hides:
                bias[rng.random(bias.shape) < 0.4] -= np.inf
                if bias.shape[2] > 1:
                    bias[..., ::3, :] -= np.inf
                bias[..., [case.hides(key) for key in range(bias.shape[3])]] -= np.inf
            self.raw_bias, self.bias = round_to(dtype, bias)

    def bias_of(self, case: Case, i: int):
        """[h, Lq, Lkv] of sequence i."""
        if self.bias is None:
            return None
        b, h, rows, keys = self.bias.shape
        shape = len(case.q.lens), case.heads[0], case.q.axis(), keys
        return np.broadcast_to(self.bias, shape)[i, :, : case.q.lens[i], : case.kv.lens[i]]


def hidden_keys(case: Case) -> np.ndarray:
    """bool [sum kv_len]: keys that bias_hides hides from all rows."""
    return np.array([case.hides(key) for n in case.kv.lens for key in range(n)], bool)


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


def header(case: Case, dtype: str, with_gradients: bool, largest_logit: float) -> bytes:
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
    return struct.pack("<32s96s27q4d", *names, *integers, *numbers, drop, largest_logit)


def fp8_numbers(case: Case, dtype: str, inputs: Inputs, found: list, with_gradients: bool) -> list:
    """Scales and amax."""
    largest = lambda name: max([0.0, *(np.max(np.nan_to_num(np.abs(getattr(a, name))), initial=0) for a in found)])
    o, d_q, d_k, d_v = (largest(name) for name in ("out", "dq", "dk", "dv"))
    p, d_p = max(a.largest_p for a in found), max(a.largest_dx for a in found)
    most_o, most_d = (part * float8_numbers(dtype)[-1] for part in case.fp8_ranges)
    scale = lambda most, x: np.float32(most / x if x > 0 else 1)
    scale_o, scales = scale(most_o, o), [scale(most_d, x) for x in (d_q, d_k, d_v)]
    *descales, descale_d_o = inputs.descales
    numbers = [*descales, 3.0, 0.25, scale_o, 1 / scale_o, descale_d_o, 5.0, 0.5, *scales]
    return [*numbers, p, o, *((d_p, d_q, d_k, d_v) if with_gradients else (0.0,) * 4)]


def record(case: Case, dtype: str, with_gradients: bool) -> bytes:
    """One problem of the file."""
    inputs = Inputs(case, dtype)
    found = answers(case, inputs, with_gradients)
    number = "<f4" if dtype == "f32" else "<f2"
    out_number = "<f4" if dtype in NARROW else number
    learnable = isinstance(case.sinks, tuple)
    join = lambda name, kind=number: b"".join(getattr(a, name).astype(kind).tobytes() for a in found)
    geometry = (*case.q.lens, *case.kv.lens, *case.q.starts(), *case.kv.starts())
    largest_logit = max(a.largest_logit for a in found)
    parts = [header(case, dtype, with_gradients, largest_logit), np.array(geometry, "<i8").tobytes()]
    if dtype in NARROW:
        parts += [np.array(fp8_numbers(case, dtype, inputs, found, with_gradients), "<f4").tobytes()]
    parts += [*inputs.raw_qkv, inputs.raw_bias]
    parts += [np.array(case.sinks, "<f4").tobytes() if learnable else b""]
    parts += [join("out", out_number), join("lse", "<f4")]
    if with_gradients:
        parts += [inputs.raw_d_out, join("dq"), join("dk"), join("dv")]
        if inputs.bias is not None:
            parts += [sum_bias(case, [a.d_bias for a in found]).astype(number).tobytes()]
        if learnable:
            parts += [np.sum([a.d_sinks for a in found], axis=0).astype("<f4").tobytes()]
    return b"".join(parts)


def has_gradients(case: Case, index: int, dtype: str) -> bool:
    return case.has_gradients and dtype in ("f32", ("f16", "bf16")[index % 2], *NARROW)


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__.splitlines()[2], file=sys.stderr)
        return 2
    records = [
        (index, case, dtype)
        for index, case in enumerate(all_cases())
        for dtype in (WIDE if case.fp8_ranges is None else NARROW)
    ]
    with open(sys.argv[1], "wb") as file:
        file.write(b"ATGOLD04" + struct.pack("<q", len(records)))
        for index, case, dtype in records:
            file.write(record(case, dtype, has_gradients(case, index, dtype)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
