"""Boolean masks, as PyTorch's scaled_dot_product_attention has them: the bias that stands for one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

_FLOAT8 = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))
_BUFFER_NAMES = {1: ("qkv",), 2: ("q", "kv"), 3: ("q", "k", "v")}
_SIDES = {"qkv": ("q", "kv"), "q": ("q",), "kv": ("kv",), "k": ("kv",), "v": ("kv",)}
# The axes of a bias, and the argument that states the size of each.
_AXES = (
    ("b", "batch"),
    ("h", "num_heads"),
    ("s_q", "max_seqlen_q"),
    ("s_kv", "max_seqlen_kv"),
)


def bias_of(
    mask: NDArray | tuple[int, ...], layout: str, given: Mapping[str, Any], dtype: np.dtype
) -> NDArray | tuple[int, ...]:
    """The post-scale bias that stands for the mask: 0 where it is True, -inf where it is False.

    Args:
      mask: bool [1|b, 1|h, 1|s_q, s_kv]; axes on the left may be left out, down to [s_q, s_kv]. A
        shape gives a shape.
      layout: of the call.
      given: the call's other arguments, those that are not None.
      dtype: of the buffers, and of the bias.

    Returns:
      The bias, of rank 4. An axis that is a broadcast view (np.broadcast_to) has size 1 in it, the
      last axis excepted. Its shape follows from the mask's form and never from its values, so that
      all masks of a form share one plan.

    Raises:
      TypeError: the mask is no bool array.
      ValueError: its shape is none of these, where the arguments say the sizes (else the service
        refuses the bias); or it meets a bias, a bias_kind or float8 buffers.
    """
    _check_alone(given, dtype)
    if isinstance(mask, tuple):
        _check_shape(mask, layout, given)
        return (1,) * (4 - len(mask)) + mask
    if mask.dtype != np.bool_:
        raise TypeError(f"mask must be a bool array (True: attend), not {mask.dtype}")
    _check_shape(mask.shape, layout, given)
    mask = mask[(None,) * (4 - mask.ndim)]
    repeats = [size > 1 and stride == 0 for size, stride in zip(mask.shape, mask.strides)]
    mask = mask[tuple(slice(0, 1 if repeated else None) for repeated in repeats[:-1])]
    bias = np.full(mask.shape, -np.inf, dtype)
    bias[mask] = 0
    return bias


def _check_alone(given: Mapping[str, Any], dtype: np.dtype) -> None:
    if "bias" in given:
        raise ValueError("mask and bias exclude each other: put -inf into bias where mask is False")
    kind = given.get("bias_kind", "none")
    if not isinstance(kind, str) or kind.lower() != "none":
        raise ValueError(f"mask and bias_kind {kind!r} exclude each other")
    if dtype in _FLOAT8:
        raise ValueError(f"mask is sent as a bias, and buffers of {dtype} have none")


def _check_shape(shape: tuple[int, ...], layout: str, given: Mapping[str, Any]) -> None:
    """ValueError unless the shape is a mask's, naming the first axis that is not."""
    sizes = _sizes(layout, given)
    wanted = [name if sizes[name] is None else f"{name} = {sizes[name]}" for name, _ in _AXES]
    form = f"[{', '.join(f'1|{size}' for size in wanted[:3])}, {wanted[3]}]"
    if not 2 <= len(shape) <= 4:
        raise ValueError(
            f"mask has shape {list(shape)}, of rank {len(shape)}; it must be {form}, or its last "
            "two or three axes"
        )
    first = 4 - len(shape)
    for axis, have in enumerate(shape):
        name, _ = _AXES[first + axis]
        want = sizes[name]
        if want is None or have == want or (have == 1 and name != "s_kv"):
            continue
        size = f"{name}, {want}" if name == "s_kv" else f"1 or {name}, {want}"
        raise ValueError(
            f"mask has shape {list(shape)}: axis {axis} is {have} and must be {size}; mask is "
            f"{form}, axes on the left may be left out"
        )


def _sizes(layout: str, given: Mapping[str, Any]) -> dict[str, int | None]:
    """b, h, s_q and s_kv as the call's arguments say them; None where they do not."""
    sizes: dict[str, int | None] = {name: None for name, _ in _AXES}
    paged = layout.upper().startswith("PAGED_KV_")
    parts = layout.upper().removeprefix("PAGED_KV_").split("_")
    ragged: set[str] = set()  # The sides without an axis of lengths.
    for name, part in zip(_BUFFER_NAMES.get(len(parts), ()), parts):
        is_pool = paged and name != "q"  # Its B counts pages, and its S their rows.
        if is_pool or "T" in part:
            ragged.update(_SIDES[name])
        shape = getattr(given.get(name), "shape", given.get(name))
        if is_pool or not isinstance(shape, tuple) or len(shape) != len(part):
            continue
        axes = dict(zip(part, shape))
        _learn(sizes, "b", axes.get("B"))
        for side in _SIDES[name]:
            _learn(sizes, f"s_{side}", axes.get("S"))
        if name in ("qkv", "q"):
            _learn(sizes, "h", axes.get("H"))
    for name, argument in _AXES:
        _learn(sizes, name, given.get(argument))
    for side in ("q", "kv"):
        lengths = np.diff(np.ravel(given.get(f"cu_seqlens_{side}", ())))
        if lengths.size > 0:
            _learn(sizes, "b", lengths.size)
            _learn(sizes, f"s_{side}", int(lengths.max()) if side in ragged else None)
    return sizes


def _learn(sizes: dict[str, int | None], name: str, size: int | None) -> None:
    if sizes[name] is None:
        sizes[name] = size
