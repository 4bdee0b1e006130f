"""Attention of one sequence, and its gradients, in float64: formulas in NumPy and nothing else."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Attention:
    """One sequence.

    Args:
      q, k, v: [s_q, h, d_qk], [s_kv, g, d_qk], [s_kv, g, d_v].
      scale: default 1 / sqrt(d_qk).
      visible: [s_q, s_kv]; default: everything.
      softcap: of the scaled logits.
      pre_bias, post_bias: broadcast to [h, s_q, s_kv]; added before the scale, or after the cap.
      sink: [h], logits that only the denominator has; -inf is none.
      keep: [h, s_q, s_kv], what dropout multiplies the weights with.

    Attributes:
      out: [s_q, h, d_v].
      lse: [s_q, h].
      weights: [h, s_q, s_kv], the softmax before dropout.
    """

    def __init__(
        self,
        q: NDArray,
        k: NDArray,
        v: NDArray,
        *,
        scale: float | None = None,
        visible: NDArray | None = None,
        softcap: float | None = None,
        pre_bias: NDArray | float = 0.0,
        post_bias: NDArray | float = 0.0,
        sink: NDArray | None = None,
        keep: NDArray | float = 1.0,
    ) -> None:
        heads, kv_heads = q.shape[1], k.shape[1]
        self._shared = heads // kv_heads
        self._q = q.astype(np.float64)
        self._k, self._v = (
            np.repeat(array.astype(np.float64), self._shared, axis=1) for array in (k, v)
        )
        self._scale = q.shape[-1] ** -0.5 if scale is None else scale
        self._keep = keep
        logits = self._scale * (np.einsum("ihd,jhd->hij", self._q, self._k) + pre_bias)
        self._cap_slope: NDArray | float = 1.0
        if softcap is not None:
            squashed = np.tanh(logits / softcap)
            logits, self._cap_slope = softcap * squashed, 1 - squashed**2
        logits = logits + post_bias
        if visible is not None:
            logits = np.where(visible, logits, -np.inf)
        self._sink = np.full(heads, -np.inf) if sink is None else sink.astype(np.float64)
        with np.errstate(divide="ignore"):
            lse = np.log(np.exp(logits).sum(axis=-1) + np.exp(self._sink)[:, None])
        self.weights = np.exp(logits - np.where(np.isinf(lse), 0, lse)[..., None])
        self.lse = lse.T
        self.out = np.einsum("hij,jhd->ihd", self.weights * keep, self._v)

    def backward(self, d_out: NDArray) -> dict[str, NDArray]:
        """Gradients of sum(out * d_out).

        "q", "k" and "v" in their shapes, "pre_bias" and "post_bias" [h, s_q, s_kv], "sink" [h].
        """
        d_out = d_out.astype(np.float64)
        d_weights = np.einsum("ihd,jhd->hij", d_out, self._v) * self._keep
        row_sums = (self.weights * d_weights).sum(axis=-1)
        d_logits = self.weights * (d_weights - row_sums[..., None])
        d_product = self._scale * self._cap_slope * d_logits
        with np.errstate(invalid="ignore"):
            sink_weights = np.exp(self._sink - np.where(np.isinf(self.lse), 0, self.lse)).T
        return {
            "q": np.einsum("hij,jhd->ihd", d_product, self._k),
            "k": self._of_kv_heads(np.einsum("hij,ihd->jhd", d_product, self._q)),
            "v": self._of_kv_heads(np.einsum("hij,ihd->jhd", self.weights * self._keep, d_out)),
            "pre_bias": d_product,
            "post_bias": d_logits,
            "sink": -(sink_weights * row_sums).sum(axis=-1),
        }

    def _of_kv_heads(self, gradient: NDArray) -> NDArray:
        """Sums over the query heads that share a KV head."""
        rows, heads, dim = gradient.shape
        return gradient.reshape(rows, heads // self._shared, self._shared, dim).sum(axis=2)
