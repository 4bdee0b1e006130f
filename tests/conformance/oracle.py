"""Float64 attention and its gradients, row by row: what every backend has to agree with.

One sequence at a time, one query row at a time, each row over exactly the keys that it may see. No
mask matrices, no strides, no layouts. A bias of -inf hides its cell as a mask does. A row that sees no
key gets O = 0 and has no gradient, and its LSE is the sink's logit, or -inf. LSE is the natural
logarithm of the softmax denominator.

Where nothing contributes to an answer it is NaN here: the service's answer is exactly 0 there.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Mask:
    """Which keys a query sees. `left` and `right` are inclusive; None is unlimited."""

    causal: str = "none"  # none | top_left | bottom_right
    left: int | None = None
    right: int | None = None
    alignment: str = "none"  # of a window or ALiBi without causal mask: none | top_left | bottom_right

    def diagonal(self, row: int, q_len: int, kv_len: int) -> int:
        anchor = self.alignment if self.causal == "none" else self.causal
        return row + (kv_len - q_len if anchor == "bottom_right" else 0)

    def visible(self, row: int, q_len: int, kv_len: int) -> range:
        """Keys that query `row` of a sequence of these lengths sees."""
        diagonal = self.diagonal(row, q_len, kv_len)
        right = self.right if self.causal == "none" else 0
        first = 0 if self.left is None else max(0, diagonal - self.left)
        last = kv_len if right is None else min(kv_len, diagonal + right + 1)
        return range(first, max(first, last))


@dataclasses.dataclass(frozen=True)
class Problem:
    """Head counts and dims, and what leads from Q K^T to the softmax."""

    num_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_v: int
    mask: Mask = Mask()
    scale: float | None = None  # None: 1 / sqrt(head_dim_qk)
    softcap: float | None = None
    bias_kind: str = "none"  # none | pre_scale | post_scale | alibi
    slopes: tuple = ()  # of ALiBi, by head
    sinks: tuple | None = None  # logits, by head
    drop: float = 0.0

    def factor(self) -> float:
        return self.head_dim_qk**-0.5 if self.scale is None else self.scale


@dataclasses.dataclass
class Sequence:
    """q [Lq, h, d_qk], k [Lkv, g, d_qk], v [Lkv, g, d_v]; the rest where the problem has it."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    d_out: np.ndarray | None = None  # [Lq, h, d_v]
    bias: np.ndarray | None = None  # [h, Lq, Lkv]
    keep: np.ndarray | None = None  # [h, Lq, Lkv] bool


@dataclasses.dataclass
class Answer:
    """out [Lq, h, d_v], lse [Lq, h]; gradients like their inputs, if d_out was given."""

    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    d_bias: np.ndarray  # [h, Lq, Lkv]
    d_sinks: np.ndarray  # [h]
    largest_p: float = 0.0  # Of the softmax, before dropout.
    largest_dx: float = 0.0  # Of the gradient of q.k, in absolute value.
    largest_logit: float = 0.0  # In absolute value.


def alibi_slopes(total_heads: int, first: int, count: int) -> tuple:
    """Slopes of heads first .. first + count - 1 of a model with total_heads heads.

    With a power of two of heads they fall from 2^(-8/h) by that factor. Other models have those of
    the next smaller power of two, then every second one of the next larger.
    """
    power = 1 << (total_heads.bit_length() - 1)
    small = [2.0 ** (-8.0 * k / power) for k in range(1, power + 1)]
    large = [2.0 ** (-8.0 * k / (2 * power)) for k in range(1, 2 * power + 1)]
    return tuple((small + large[::2])[first : first + count])


def _logits(problem: Problem, s: Sequence, row: int, seen: range):
    """-> x [h, keys] and its derivative by q.k."""
    h, g = problem.num_heads, problem.num_kv_heads
    keys = np.repeat(s.k[seen.start : seen.stop], h // g, axis=1)  # [keys, h, d]
    bias = None if s.bias is None else s.bias[:, row, seen.start : seen.stop]
    x = np.einsum("hd,khd->hk", s.q[row], keys)
    if problem.bias_kind == "pre_scale":
        x = x + bias
    x = problem.factor() * x
    slope = np.full_like(x, problem.factor())
    if problem.softcap is not None:
        x = problem.softcap * np.tanh(x / problem.softcap)
        slope = slope * (1 - (x / problem.softcap) ** 2)
    if problem.bias_kind == "post_scale":
        x = x + bias
    if problem.bias_kind == "alibi":
        distance = np.abs(np.array(seen) - problem.mask.diagonal(row, len(s.q), len(s.k)))
        x = x - np.outer(problem.slopes, distance)
    return x, slope


def _softmax(x: np.ndarray, sink: float):
    """x [keys] and one more logit -> weights of the keys, of the sink, and the LSE."""
    top = max(x.max(), sink)
    weights = np.exp(x - top)
    rest = np.exp(sink - top)
    total = weights.sum() + rest
    return weights / total, rest / total, top + np.log(total)


def attend(problem: Problem, s: Sequence) -> Answer:
    h, g = problem.num_heads, problem.num_kv_heads
    a = Answer(
        out=np.full((len(s.q), h, problem.head_dim_v), np.nan),
        lse=np.full((len(s.q), h), -np.inf),
        dq=np.full(s.q.shape, np.nan),
        dk=np.full(s.k.shape, np.nan),
        dv=np.full(s.v.shape, np.nan),
        d_bias=np.full((h, len(s.q), len(s.k)), np.nan),
        d_sinks=np.zeros(h),
    )
    if problem.sinks is not None:
        a.lse[:] = problem.sinks
    for row in range(len(s.q)):
        seen = problem.mask.visible(row, len(s.q), len(s.k))
        if not seen:
            continue
        x, slope = _logits(problem, s, row, seen)
        for n in range(h):
            cells = np.array(seen)
            if s.bias is not None:
                cells = cells[s.bias[n, row, cells] != -np.inf]
            if len(cells) > 0:
                at = cells - seen.start
                _attend_row(problem, s, a, row, n, cells, x[n, at], slope[n, at])
    return a


def _add(total: np.ndarray, cells: np.ndarray, kv: int, contribution: np.ndarray) -> None:
    before = total[cells, kv]
    total[cells, kv] = np.where(np.isnan(before), 0.0, before) + contribution


def _attend_row(problem, s, a, row, n, seen, x, slope) -> None:
    """Row `row` of head n, which sees the keys `seen`: O and LSE, and what it adds to the gradients."""
    kv = n // (problem.num_heads // problem.num_kv_heads)
    p, p_sink, a.lse[row, n] = _softmax(x, -np.inf if problem.sinks is None else problem.sinks[n])
    a.largest_p = max(a.largest_p, p.max())
    a.largest_logit = max(a.largest_logit, np.abs(x).max())
    kept = np.ones_like(p) if s.keep is None else s.keep[n, row, seen] / (1 - problem.drop)
    a.out[row, n] = (p * kept) @ s.v[seen, kv]
    if s.d_out is None:
        return
    d_out = s.d_out[row, n]
    dp = kept * (s.v[seen, kv] @ d_out)
    # d p_j / d x_k = p_j ((j = k) - p_k), and -p_j p_sink for the sink's logit.
    jacobian = np.diag(p) - np.outer(p, p)
    dx = jacobian @ dp
    a.largest_dx = max(a.largest_dx, np.abs(dx * slope).max())
    a.d_sinks[n] -= p_sink * (p @ dp)
    a.d_bias[n, row, seen] = dx * slope if problem.bias_kind == "pre_scale" else dx
    a.dq[row, n] = (dx * slope) @ s.k[seen, kv]
    _add(a.dk, seen, kv, np.outer(dx * slope, s.q[row, n]))
    _add(a.dv, seen, kv, np.outer(p * kept, d_out))
