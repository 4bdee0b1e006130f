"""The problems of the conformance suite: logical, without any layout.

"self" problems have the same lengths and positions on both sides (what a layout with a packed Q
needs), "cross" problems do not.
"""

import dataclasses
import itertools

from oracle import Mask


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
    bias_kind: str = "none"  # none | pre_scale | post_scale | alibi
    bias_shape: str = "11ss"  # 11ss | 1hss | b1ss | bhss | 111s
    bias_mean: float = 0.0
    # -inf in every third row of the bias, in 2 of 5 cells elsewhere, and at every hidden key, whose K
    # and V are NaN and inf.
    bias_hides: bool = False
    bias_lowest: bool = False  # Every third row of the bias, and the first keys, are the dtype's lowest number.
    level: float = 0.0  # What q.k has beside the product of random numbers, after the scale.
    alibi: tuple | None = None  # first head, heads of the model; None: all heads are here
    sinks: tuple | str | None = None  # by head, "off_by_one", or none
    dropout: tuple | None = None  # probability, seed, offset
    has_gradients: bool = True
    fp8_ranges: tuple | None = None  # With FP8 alone: what O and gradients use of their type's range.

    def bias_dims(self) -> tuple:
        b, h = len(self.q.lens), self.heads[0]
        sizes = {"1": 1, "b": b, "h": h}
        rows = 1 if self.bias_shape == "111s" else self.q.axis()
        return sizes[self.bias_shape[0]], sizes[self.bias_shape[1]], rows, self.kv.axis()

    @staticmethod
    def hides(key: int) -> bool:
        """With bias_hides, whether no row sees this key of a sequence: one, and more than a tile's."""
        return key == 1 or 120 <= key < 330

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
            alike, unlike = ((16, 16), (24, 8)) if head_name == "mha" else ((8, 8), (8, 16))
            name = f"{mask_name}.{head_name}.{length_name}"
            yield Case(group, f"{name}.self", both, both, heads, alike, mask)
            yield Case(group, f"{name}.cross", q, kv, heads, alike, mask)
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
    # Rows whose LSE is far below zero, where exp(-LSE) would overflow a float. Each sees one key, so
    # that dQ and dK would be 0 but for rounding errors times this scale.
    far = Mask(left=0, right=0)
    yield Case("scale", "far_negative", both, both, (2, 2), (64, 64), far, 6.0, has_gradients=False)


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


PARAMETER_MASKS = {
    "none": Mask(),
    "causal_br": Mask(causal="bottom_right"),
    "window_br": Mask(left=2, right=3, alignment="bottom_right"),
}
PARAMETER_LENGTHS = itertools.cycle(("lengths", "gaps", "full", "zero_middle"))


def _sides():
    """-> name, q side, kv side, heads and dims of a self and two cross problems."""
    both, q, kv = LENGTHS[next(PARAMETER_LENGTHS)]
    yield "self", both, both, (3, 3), (16, 16)
    yield "cross", q, kv, (4, 2), (8, 8)
    yield "cross.d_v", q, kv, (4, 1), (24, 8)


def biases():
    for kind, group in (("pre_scale", "bias_pre"), ("post_scale", "bias_post")):
        shapes = ("11ss", "1hss", "b1ss", "bhss", "111s")
        for shape, (mask_name, mask) in itertools.product(shapes, PARAMETER_MASKS.items()):
            for side, *sizes in _sides():
                yield Case(group, f"{shape}.{mask_name}.{side}", *sizes, mask, bias_kind=kind, bias_shape=shape)
        for side, *sizes in _sides():  # As in "far_negative", with gradients.
            yield Case(group, f"far.{side}", *sizes, bias_kind=kind, scale=1.0, bias_mean=-120.0)
        for shape in ("1hss", "111s"):
            for side, *sizes in _sides():
                extra = {"bias_kind": kind, "bias_shape": shape}
                yield Case(group, f"{shape}.cap.{side}", *sizes, Mask(), None, 1.5, **extra)
                yield Case(group, f"{shape}.scale.{side}", *sizes, Mask(), -0.7, **extra)
        hiding = {"bias_kind": kind, "bias_hides": True}
        for shape, (mask_name, mask) in itertools.product(shapes, PARAMETER_MASKS.items()):
            for side, *sizes in _sides():
                yield Case(group, f"hides.{shape}.{mask_name}.{side}", *sizes, mask, bias_shape=shape, **hiding)
        for side, *sizes in _sides():
            yield Case(group, f"hides.scale.{side}", *sizes, Mask(), -0.7, **hiding)
            yield Case(group, f"hides.cap.{side}", *sizes, Mask(), 1.0, 0.8, **hiding)
            yield Case(group, f"hides.dropout.{side}", *sizes, Mask(), dropout=(0.3, 4, 5), **hiding)
            yield Case(group, f"hides.sinks.{side}", *sizes, Mask(), sinks=(1.0, -2.0, 3.0, 0.5)[: sizes[2][0]], **hiding)
        long = Side((150,)), Side((400,)), (2, 1), (16, 8)
        yield Case(group, "hides.tiles", *long, Mask(causal="bottom_right"), bias_shape="1hss", **hiding)
        few = Side((3,)), Side((700,)), (2, 1), (8, 8)
        yield Case(group, "hides.few_rows", *few, bias_shape="1hss", **hiding)


def alibis():
    masks = PARAMETER_MASKS | {
        "none": Mask(alignment="top_left"),
        "none_br": Mask(alignment="bottom_right"),
        "causal_tl": Mask(causal="top_left"),
    }
    for mask_name, mask in masks.items():
        for heads, (side, *sizes) in itertools.product((3, 8), list(_sides())):
            if side == "self":
                sizes[2] = (heads, heads)
            elif heads == 8:
                sizes[2] = (6, 2)
            yield Case("alibi", f"{mask_name}.{heads}.{side}", *sizes, mask, bias_kind="alibi")
        for side, *sizes in _sides():
            for shard in ((0, 16), (3, 13)):
                name = f"{mask_name}.shard{shard[0]}of{shard[1]}.{side}"
                yield Case("alibi", name, *sizes, mask, bias_kind="alibi", alibi=shard)


def sinks():
    levels = {"off_by_one": "off_by_one", "learnable": (-1.0, 0.0, 2.5, 5.0), "far": (5.0, 20.0, 0.0, 100.0)}
    for (name, level), (mask_name, mask) in itertools.product(levels.items(), PARAMETER_MASKS.items()):
        for side, *sizes in _sides():
            heads = sizes[2][0]
            level_of_heads = level if isinstance(level, str) else level[:heads]
            yield Case("sinks", f"{name}.{mask_name}.{side}", *sizes, mask, sinks=level_of_heads)
    for side, *sizes in _sides():
        yield Case("sinks", f"cap.{side}", *sizes, Mask(), None, 2.0, sinks=(1.0, -2.0, 3.0, 0.5)[: sizes[2][0]])
    yield Case("sinks", "no_keys", Side((3, 5)), Side((0, 0)), (2, 1), (8, 8), sinks=(1.0, -2.0))


def dropouts():
    seeds = itertools.cycle(((0, 0), (42, 7), (-1, 2**40), (2**62 + 5, -3)))
    for p, (mask_name, mask) in itertools.product((0.1, 0.5, 0.9), PARAMETER_MASKS.items()):
        for side, *sizes in _sides():
            yield Case("dropout", f"{p}.{mask_name}.{side}", *sizes, mask, dropout=(p, *next(seeds)))
    for side, *sizes in _sides():
        everything = {"sinks": (1.0, -2.0, 3.0, 0.5)[: sizes[2][0]], "dropout": (0.3, *next(seeds))}
        for kind in ("pre_scale", "post_scale", "alibi"):
            name = f"with_{kind}.{side}"
            mask = PARAMETER_MASKS["window_br"]
            yield Case("dropout", name, *sizes, mask, 0.4, 2.0, kind, "1hss", **everything)
    yield Case("dropout", "long", Side((70, 3)), Side((129, 40)), (2, 1), (8, 8), dropout=(0.25, 1, 2))


def fp8() -> list:
    masks = PARAMETER_MASKS | {"causal_tl": Mask(causal="top_left")}
    fit = 0.5, 0.5
    for _ in range(2):
        for mask_name, mask in masks.items():
            for side, q, *sizes in _sides():
                yield Case("fp8", f"{mask_name}.{q.axis()}.{side}", q, *sizes, mask, fp8_ranges=fit)
    features = {
        "scale": {"scale": -0.7},
        "cap": {"scale": 1.0, "softcap": 0.8},
        "alibi": {"bias_kind": "alibi"},
        "dropout": {"dropout": (0.3, 42, 7)},
        "o_saturates": {"fp8_ranges": (3.0, 0.5), "has_gradients": False},
        "d_saturates": {"fp8_ranges": (0.5, 3.0)},
    }
    for name, feature in features.items():
        for side, *sizes in _sides():
            mask = PARAMETER_MASKS["causal_br"]
            yield Case("fp8", f"{name}.{side}", *sizes, mask, **{"fp8_ranges": fit, **feature})
    for side, *sizes in _sides():
        levels = (1.0, -2.0, 3.0, 0.5)[: sizes[2][0]]
        yield Case("fp8", f"sinks.{side}", *sizes, sinks=levels, fp8_ranges=fit)
    few = Side((1, 1)), Side((300, 40)), (4, 2), (16, 16)
    yield Case("fp8", "decode", *few, fp8_ranges=fit, has_gradients=False)
    chunks = Side((3,)), Side((700,)), (2, 1), (8, 8)
    yield Case("fp8", "few_rows", *chunks, fp8_ranges=fit, has_gradients=False)
    tall = Side((150,)), Side((150,)), (1, 1), (8, 8)
    yield Case("fp8", "tall", *tall, Mask(causal="top_left"), fp8_ranges=fit)
    yield Case("fp8", "no_keys", Side((3, 5)), Side((0, 0)), (2, 1), (8, 8), fp8_ranges=fit)


def large():
    """Logits at which float32's LSE, or float32 itself, is not enough."""
    for level, (mask_name, mask) in itertools.product((300.0, 7e4, -7e4), PARAMETER_MASKS.items()):
        for side, *sizes in _sides():
            yield Case("large", f"level{level:g}.{mask_name}.{side}", *sizes, mask, level=level)
    for side, *sizes in _sides():
        yield Case("large", f"level.dropout.{side}", *sizes, dropout=(0.3, 6, 7), level=5000.0)
        sinks = (2000.0, 1998.0, -5.0, 3000.0)[: sizes[2][0]]
        yield Case("large", f"level.sinks.{side}", *sizes, sinks=sinks, bias_kind="post_scale", bias_mean=2000.0)
    wide = Side((90, 40)), Side((150, 300)), (4, 2), (128, 128)
    yield Case("large", "level.wide", *wide, Mask(causal="bottom_right"), level=4e4)
    kinds = ("pre_scale", "post_scale"), (None, 1.5), ("11ss", "bhss", "111s")
    for kind, scale, shape in itertools.product(*kinds):
        for side, *sizes in _sides():
            name = f"lowest.{kind}.{scale}.{shape}.{side}"
            mask = Mask(causal="bottom_right")
            yield Case("large", name, *sizes, mask, scale, bias_kind=kind, bias_shape=shape, bias_lowest=True)
    for side, *sizes in _sides():
        lowest = {"bias_kind": "post_scale", "bias_shape": "1hss", "bias_lowest": True}
        yield Case("large", f"lowest.dropout.{side}", *sizes, dropout=(0.3, 8, 9), **lowest)
        yield Case("large", f"lowest.hides.{side}", *sizes, bias_hides=True, **lowest)
    left_padding = Side((20,)), Side((20,)), (2, 1), (64, 64)
    yield Case("large", "lowest.left_padding", *left_padding, bias_kind="post_scale", bias_lowest=True)


def all_cases() -> list:
    plain = [*grid(), *head_dims(), *scales(), *windows(), *tiles(), *shapes()]
    return [*plain, *biases(), *alibis(), *sinks(), *dropouts(), *fp8(), *large()]
