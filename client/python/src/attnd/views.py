"""Views for layout STRIDED of projections that models make."""

from __future__ import annotations

import numpy as np

from attnd.arguments import View


def megatron(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: object,
    batch: int | None = None,
    seqlen: int | None = None,
    buffer: str = "qkv",
) -> dict[str, View]:
    """The views of a projection whose rows are [g, (h/g + 2), d].

    Each of the g groups has its h/g query heads side by side, then its head of K and of V, as
    Megatron-LM, GPT-NeoX (g = h) and Falcon with several KV heads have it.

    Args:
      num_heads: h; a multiple of num_kv_heads.
      num_kv_heads: g.
      head_dim: d, of Q, K and V.
      dtype: of the projection, as NumPy (or ml_dtypes) names it.
      batch: b of a projection [s, b, g, (h/g + 2), d]. None, and seqlen None: [t, g, (h/g + 2), d],
        the rows of sequences one behind the other.
      seqlen: s of a projection [b, s, g, (h/g + 2), d], batch first. Not together with batch.
      buffer: its name in the call.

    Returns:
      {"q": View, "k": View, "v": View}, for `views`.

    Raises:
      ValueError: sizes that contradict one another.
    """
    for name, size in {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}.items():
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be at least 1")
    if num_heads % num_kv_heads != 0:
        raise ValueError(f"num_heads is {num_heads}, which is no multiple of num_kv_heads, {num_kv_heads}")
    if batch is not None and seqlen is not None:
        raise ValueError("batch is for [s, b, ...] and seqlen for [b, s, ...]; one of them is enough")
    shared = num_heads // num_kv_heads
    group = (shared + 2) * head_dim
    row = num_kv_heads * group
    if batch is not None:
        rows: tuple[int, ...] = (row, batch * row)
    elif seqlen is not None:
        rows = (seqlen * row, row)
    else:
        rows = (row,)
    itemsize = np.dtype(dtype).itemsize

    def kv(head: int) -> View:
        return View(buffer, itemsize * head * head_dim, (*rows, group, 1))

    return {"q": View(buffer, 0, (*rows, head_dim, 1), group), "k": kv(shared), "v": kv(shared + 1)}
