"""Float64 attention forward, row by row: what every backend has to agree with.

One sequence at a time, one query row at a time, each row over exactly the keys that it may see. No
mask matrices, no strides, no layouts. A row that sees no key gets O = 0 and LSE = -inf. LSE is the
natural logarithm of the softmax denominator.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Mask:
    """Which keys a query sees. `left` and `right` are inclusive; None is unlimited."""

    causal: str = "none"  # none | top_left | bottom_right
    left: int | None = None
    right: int | None = None
    alignment: str = "none"  # of a window without causal mask: none | top_left | bottom_right

    def visible(self, row: int, q_len: int, kv_len: int) -> range:
        """Keys that query `row` of a sequence of these lengths sees."""
        anchor = self.alignment if self.causal == "none" else self.causal
        diagonal = row + (kv_len - q_len if anchor == "bottom_right" else 0)
        right = self.right if self.causal == "none" else 0
        first = 0 if self.left is None else max(0, diagonal - self.left)
        last = kv_len if right is None else min(kv_len, diagonal + right + 1)
        return range(first, max(first, last))


@dataclasses.dataclass(frozen=True)
class Problem:
    """Head counts and dims, and the map from Q K^T to logits."""

    num_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_v: int
    mask: Mask = Mask()
    scale: float | None = None  # None: 1 / sqrt(head_dim_qk)
    softcap: float | None = None

    def logits(self, products: np.ndarray) -> np.ndarray:
        x = products * (self.head_dim_qk**-0.5 if self.scale is None else self.scale)
        return x if self.softcap is None else self.softcap * np.tanh(x / self.softcap)


def attend(problem: Problem, q: np.ndarray, k: np.ndarray, v: np.ndarray):
    """One sequence: q [Lq, h, d_qk], k [Lkv, g, d_qk], v [Lkv, g, d_v] -> O [Lq, h, d_v], LSE [Lq, h]."""
    h, g = problem.num_heads, problem.num_kv_heads
    q = np.asarray(q, np.float64).reshape(-1, g, h // g, problem.head_dim_qk)
    k = np.asarray(k, np.float64)
    v = np.asarray(v, np.float64)
    out = np.zeros((len(q), h, problem.head_dim_v))
    lse = np.full((len(q), h), -np.inf)
    for row in range(len(q)):
        seen = problem.mask.visible(row, len(q), len(k))
        if not seen:
            continue
        keys, values = k[seen.start : seen.stop], v[seen.start : seen.stop]
        # [g, h/g, keys]: each KV head serves h/g consecutive query heads.
        x = problem.logits(q[row] @ keys.transpose(1, 2, 0))
        top = x.max(axis=-1, keepdims=True)
        weights = np.exp(x - top)
        total = weights.sum(axis=-1, keepdims=True)
        out[row] = ((weights / total) @ values.transpose(1, 0, 2)).reshape(h, -1)
        lse[row] = (top + np.log(total)).reshape(h)
    return out, lse
