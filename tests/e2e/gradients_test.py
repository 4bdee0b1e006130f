"""Gradients through the whole service against NumPy's: gradients_test.py.

Forward and Backward run in the server, as a training step would call them; the oracle computes the
same in float64, and finite differences of Forward alone check both.
"""

import dataclasses
import math
import pathlib
import sys
import time
import unittest
from collections.abc import Callable

import grpc
import ml_dtypes
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import attention_oracle
from server_process import ServerProcess

import attnd

HEADS, KV_HEADS, DIM, DIM_V = 4, 2, 8, 12
# RMS error over the RMS of the gradient, which counts as at least 0.1.
BOUNDS = {np.dtype("<f4"): 3e-5, np.dtype("<f2"): 8e-3, np.dtype(ml_dtypes.bfloat16): 3e-2}
Q_LENGTHS, KV_LENGTHS = (3, 6), (5, 7)
CU_Q, CU_KV = (0, 3, 9), (0, 5, 12)
Q_STARTS, KV_STARTS = (1, 5, 12), (0, 7, 15)  # With gaps.


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """A layout with the buffers that it needs for two sequences.

    Attributes:
      shapes: of the buffers.
      parts: (buffers, sequence) -> views of its rows of Q, K and V.
      rows: (O, sequence) -> view of its rows [s_q, h, d_v]; the same for LSE [s_q, h].
      arguments: of the calls, beside the buffers.
      same_lengths: whether keys have the queries' lengths.
    """

    layout: str
    shapes: dict[str, tuple[int, ...]]
    parts: Callable
    out_rows: Callable
    lse_rows: Callable
    arguments: dict
    same_lengths: bool = False

    def lengths(self, i):
        return Q_LENGTHS[i], (Q_LENGTHS if self.same_lengths else KV_LENGTHS)[i]


def dense_lse(lse, i):
    return lse[i, :, : Q_LENGTHS[i]].T


def ragged(starts, lengths):
    return lambda array, i: array[starts[i] : starts[i] + lengths[i]]


LENGTHS = {"cu_seqlens_q": CU_Q, "cu_seqlens_kv": CU_KV}
SAME_LENGTHS = {"cu_seqlens_q": CU_Q, "cu_seqlens_kv": CU_Q}
GAPS = {"cu_seqlens_q_padded": Q_STARTS, "cu_seqlens_kv_padded": KV_STARTS}
SAME_GAPS = {"cu_seqlens_q_padded": Q_STARTS, "cu_seqlens_kv_padded": Q_STARTS}
Q_ROWS, KV_ROWS = ragged(Q_STARTS, Q_LENGTHS), ragged(KV_STARTS, KV_LENGTHS)


def batch_first(array, i):
    return array[i, : Q_LENGTHS[i]]


ARRANGEMENTS = (
    Arrangement(
        "BS3HD",
        {"qkv": (2, 8, 3, HEADS, DIM)},
        lambda b, i: [b["qkv"][i, : Q_LENGTHS[i], slot] for slot in range(3)],
        batch_first,
        dense_lse,
        SAME_LENGTHS,
        same_lengths=True,
    ),
    Arrangement(
        "SBH3D",
        {"qkv": (7, 2, HEADS, 3, DIM)},
        lambda b, i: [b["qkv"][: Q_LENGTHS[i], i, :, slot] for slot in range(3)],
        lambda out, i: out[: Q_LENGTHS[i], i],
        dense_lse,
        SAME_LENGTHS,
        same_lengths=True,
    ),
    Arrangement(
        "T3HD",
        {"qkv": (14, 3, HEADS, DIM)},
        lambda b, i: [Q_ROWS(b["qkv"], i)[:, slot] for slot in range(3)],
        Q_ROWS,
        Q_ROWS,
        SAME_LENGTHS | SAME_GAPS,
        same_lengths=True,
    ),
    Arrangement(
        "BSHD_BS2HD",
        {"q": (2, 6, HEADS, DIM), "kv": (2, 9, 2, KV_HEADS, DIM)},
        lambda b, i: [
            batch_first(b["q"], i),
            *(b["kv"][i, : KV_LENGTHS[i], slot] for slot in range(2)),
        ],
        batch_first,
        dense_lse,
        LENGTHS,
    ),
    Arrangement(
        "THD_TH2D",
        {"q": (13, HEADS, DIM), "kv": (16, KV_HEADS, 2, DIM)},
        lambda b, i: [
            Q_ROWS(b["q"], i),
            *(KV_ROWS(b["kv"], i)[:, :, slot] for slot in range(2)),
        ],
        Q_ROWS,
        Q_ROWS,
        LENGTHS | GAPS,
    ),
    Arrangement(
        "BHSD_BHSD_BHSD",
        {"q": (2, HEADS, 6, DIM), "k": (2, KV_HEADS, 8, DIM), "v": (2, KV_HEADS, 8, DIM_V)},
        lambda b, i: [
            b[name][i, :, :length].swapaxes(0, 1)
            for name, length in (("q", Q_LENGTHS[i]), ("k", KV_LENGTHS[i]), ("v", KV_LENGTHS[i]))
        ],
        lambda out, i: out[i, :, : Q_LENGTHS[i]].swapaxes(0, 1),
        dense_lse,
        LENGTHS,
    ),
    Arrangement(
        "THD_SBHD_SBHD",
        {"q": (13, HEADS, DIM), "k": (8, 2, KV_HEADS, DIM), "v": (8, 2, KV_HEADS, DIM_V)},
        lambda b, i: [
            Q_ROWS(b["q"], i),
            b["k"][: KV_LENGTHS[i], i],
            b["v"][: KV_LENGTHS[i], i],
        ],
        Q_ROWS,
        Q_ROWS,
        LENGTHS | {"cu_seqlens_q_padded": Q_STARTS},
    ),
    Arrangement(
        "STRIDED",
        {"qkv": (14, HEADS + 2 * KV_HEADS, DIM)},
        lambda b, i: np.split(Q_ROWS(b["qkv"], i), (HEADS, HEADS + KV_HEADS), axis=1),
        Q_ROWS,
        Q_ROWS,
        SAME_LENGTHS
        | SAME_GAPS
        | {
            "batch": 2,
            "max_seqlen_q": 6,
            "max_seqlen_kv": 6,
            "num_heads": HEADS,
            "num_kv_heads": KV_HEADS,
            "head_dim_qk": DIM,
            "head_dim_v": DIM,
        },
        same_lengths=True,
    ),
)


def strided_views(itemsize):
    """Of the fused projection [t, h + 2 g, d]."""
    strides = ((HEADS + 2 * KV_HEADS) * DIM, DIM, 1)
    first_heads = {"q": 0, "k": HEADS, "v": HEADS + KV_HEADS}
    return {
        name: attnd.View("qkv", itemsize * head * DIM, strides)
        for name, head in first_heads.items()
    }


def band(q_len, kv_len, left=math.inf, right=math.inf, bottom_right=False):
    """[s_q, s_kv]: the keys within reach of each query's diagonal."""
    diagonal = np.arange(q_len)[:, None] + (kv_len - q_len if bottom_right else 0)
    distance = np.arange(kv_len)[None] - diagonal
    return (distance >= -left) & (distance <= right)


def alibi(q_len, kv_len):
    """-slope |distance| of 4 heads, top-left: slopes 1/4, 1/16, ..."""
    slopes = 2.0 ** (-8 * np.arange(1, HEADS + 1) / HEADS)
    distance = np.arange(kv_len)[None] - np.arange(q_len)[:, None]
    return -slopes[:, None, None] * np.abs(distance)


# Arguments of the calls, and what they are to the oracle for a sequence's lengths.
MASKS = (
    ({}, lambda q, kv: {}),
    ({"causal": "top_left"}, lambda q, kv: {"visible": band(q, kv, right=0)}),
    (
        {"causal": "bottom_right", "logit_softcap": 1.5},
        lambda q, kv: {"visible": band(q, kv, right=0, bottom_right=True), "softcap": 1.5},
    ),
    (
        {"window": (2, 1), "window_alignment": "bottom_right", "scale": -0.7},
        lambda q, kv: {"visible": band(q, kv, 2, 1, bottom_right=True), "scale": -0.7},
    ),
    (
        {"bias_kind": "alibi", "window_alignment": "top_left", "softmax_kind": "off_by_one"},
        lambda q, kv: {"post_bias": alibi(q, kv), "sink": np.zeros(HEADS)},
    ),
)


class GradientsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        server = cls.enterClassContext(ServerProcess())
        cls.client = cls.enterClassContext(attnd.Client(server.address, timeout=60))

    def setUp(self):
        self.rng = np.random.default_rng(3)

    def normal(self, *shape, dtype=np.float32):
        return self.rng.standard_normal(shape).astype(dtype)

    def step(self, layout, **arguments):
        """Forward, then Backward with a random dO: both results, and dO."""
        forward = self.client.forward(layout, return_lse=True, **arguments)
        d_out = self.normal(*forward.out.shape, dtype=forward.out.dtype)
        backward = self.client.backward(
            layout, out=forward.out, lse=forward.lse, d_out=d_out, **arguments
        )
        return forward, backward, d_out

    def assert_near(self, got, expected, bound):
        self.assertEqual(got.shape, expected.shape)
        error = got.astype(np.float64) - expected
        rms = np.sqrt(np.mean(error**2)) / max(np.sqrt(np.mean(expected**2)), 0.1)
        self.assertLess(rms, bound)

    def check_arrangement(self, arrangement, arguments, options, dtype):
        buffers = {
            name: self.normal(*shape, dtype=dtype) for name, shape in arrangement.shapes.items()
        }
        # What is not a sequence's row, in a copy that has those poisoned.
        poisoned = {name: np.full_like(buffer, np.nan) for name, buffer in buffers.items()}
        expected = {name: np.zeros(buffer.shape) for name, buffer in buffers.items()}
        for i in range(2):
            rows = zip(arrangement.parts(poisoned, i), arrangement.parts(buffers, i))
            for target, source in rows:
                target[:] = source
        if arrangement.layout == "STRIDED":
            arguments = arguments | {"views": strided_views(np.dtype(dtype).itemsize)}
        forward, backward, d_out = self.step(
            arrangement.layout, **poisoned, **arrangement.arguments, **arguments
        )
        bound = BOUNDS[np.dtype(dtype)]
        for i in range(2):
            oracle = attention_oracle.Attention(
                *arrangement.parts(buffers, i), **options(*arrangement.lengths(i))
            )
            self.assert_near(arrangement.out_rows(forward.out, i), oracle.out, bound)
            self.assert_near(arrangement.lse_rows(forward.lse, i), oracle.lse, bound)
            gradients = oracle.backward(arrangement.out_rows(d_out, i))
            for target, name in zip(arrangement.parts(expected, i), "qkv"):
                target[:] = gradients[name]
        for name, gradient in expected.items():
            got = getattr(backward.grads, name)
            self.assertEqual(got.dtype, np.dtype(dtype))
            self.assert_near(got, gradient, bound)
        self.check_gaps(arrangement, backward)

    def check_gaps(self, arrangement, backward):
        """Exact zeros outside the sequences."""
        in_sequence = {
            name: np.zeros(shape, dtype=bool) for name, shape in arrangement.shapes.items()
        }
        for i in range(2):
            for rows in arrangement.parts(in_sequence, i):
                rows[:] = True
        for name, mask in in_sequence.items():
            self.assertFalse(np.any(getattr(backward.grads, name)[~mask]))

    def test_every_form_of_layout(self):
        for arrangement in ARRANGEMENTS:
            for arguments, options in MASKS:
                with self.subTest(layout=arrangement.layout, arguments=arguments):
                    self.check_arrangement(arrangement, arguments, options, np.float32)

    def test_16_bit_types(self):
        for dtype in (np.float16, ml_dtypes.bfloat16):
            for arrangement in ARRANGEMENTS:
                with self.subTest(layout=arrangement.layout, dtype=np.dtype(dtype).name):
                    self.check_arrangement(arrangement, *MASKS[1], dtype)

    def test_biases_of_every_shape_and_sinks(self):
        q, k, v = self.normal(2, 5, 4, 8), self.normal(2, 7, 2, 8), self.normal(2, 7, 2, 12)
        sink = self.normal(4)
        for kind in ("pre_scale", "post_scale"):
            for shape in ((1, 1, 5, 7), (1, 4, 5, 7), (2, 1, 5, 7), (2, 4, 5, 7), (1, 1, 1, 7)):
                with self.subTest(kind=kind, shape=shape):
                    bias = self.normal(*shape)
                    forward, backward, d_out = self.step(
                        "BSHD_BSHD_BSHD",
                        q=q,
                        k=k,
                        v=v,
                        bias_kind=kind,
                        bias=bias,
                        logit_softcap=5.0,
                        softmax_kind="learnable",
                        softmax_offset=sink,
                    )
                    side = f"{kind.removesuffix('_scale')}_bias"
                    d_bias, d_sink = np.zeros(shape), np.zeros(4)
                    for i in range(2):
                        of_sequence = bias[i if shape[0] == 2 else 0]
                        oracle = attention_oracle.Attention(
                            q[i], k[i], v[i], softcap=5.0, sink=sink, **{side: of_sequence}
                        )
                        self.assert_near(forward.out[i], oracle.out, 3e-5)
                        gradients = oracle.backward(d_out[i])
                        for name in "qkv":
                            got = getattr(backward.grads, name)[i]
                            self.assert_near(got, gradients[name], 3e-5)
                        axes = tuple(a for a in range(3) if shape[a + 1] == 1)
                        summed = gradients[side].sum(axis=axes, keepdims=True)
                        d_bias[i if shape[0] == 2 else 0] += summed
                        d_sink += gradients["sink"]
                    self.assert_near(backward.d_bias, d_bias, 3e-5)
                    self.assert_near(backward.d_softmax_offset, d_sink, 3e-5)

    def test_both_passes_drop_the_same_cells(self):
        q, k = self.normal(1, 6, 4, 8), self.normal(1, 16, 4, 8)
        dropout = attnd.Dropout(0.3, seed=2**40 + 7, offset=5)
        # With V = 1 on the diagonal, O is the weights.
        identity = np.broadcast_to(np.eye(16, dtype=np.float32)[:, None], (16, 4, 16))[None]
        weights = (
            self.client.forward("BSHD_BSHD_BSHD", q=q, k=k, v=identity.copy(), dropout=dropout)
            .out[0]
            .swapaxes(0, 1)
        )
        keep = (weights != 0) / 0.7
        self.assertTrue(0.5 < np.mean(weights != 0) < 0.9)
        v = self.normal(1, 16, 4, 8)
        forward, backward, d_out = self.step("BSHD_BSHD_BSHD", q=q, k=k, v=v, dropout=dropout)
        self.assertEqual(forward.rng, dropout)
        oracle = attention_oracle.Attention(q[0], k[0], v[0], keep=keep)
        self.assert_near(forward.out[0], oracle.out, 3e-5)
        for name, gradient in oracle.backward(d_out[0]).items():
            if name in "qkv":
                self.assert_near(getattr(backward.grads, name)[0], gradient, 3e-5)

    def test_gradients_are_slopes(self):
        """Of sum(O dO) along random directions, by central differences of Forward."""
        inputs = {
            "q": self.normal(7, 4, 8),
            "kv": self.normal(9, 2, 2, 8),
            "bias": self.normal(2, 4, 4, 5),
            "softmax_offset": self.normal(4),
        }
        arguments = dict(
            cu_seqlens_q=(0, 3, 7),
            cu_seqlens_kv=(0, 4, 9),
            max_seqlen_q=4,
            max_seqlen_kv=5,
            causal="bottom_right",
            window=(3, 0),
            logit_softcap=3.0,
            bias_kind="pre_scale",
            softmax_kind="learnable",
            dropout=attnd.Dropout(0.2, seed=11),
        )
        _, backward, d_out = self.step("THD_T2HD", **inputs, **arguments)
        gradients = {
            "q": backward.grads.q,
            "kv": backward.grads.kv,
            "bias": backward.d_bias,
            "softmax_offset": backward.d_softmax_offset,
        }
        step = 2.0**-7
        for name, gradient in gradients.items():
            with self.subTest(input=name):
                direction = self.normal(*gradient.shape)
                losses = []
                for sign in (1, -1):
                    moved = inputs | {name: inputs[name] + np.float32(sign * step) * direction}
                    out = self.client.forward("THD_T2HD", **moved, **arguments).out
                    losses.append(np.sum(out.astype(np.float64) * d_out))
                slope = (losses[0] - losses[1]) / (2 * step)
                expected = np.sum(gradient.astype(np.float64) * direction)
                scale = np.linalg.norm(gradient) + 1
                self.assertLess(abs(slope - expected) / scale, 5e-3)

    def test_what_shaped_forward_must_be_repeated(self):
        arguments = dict(
            q=self.normal(2, 5, 4, 8),
            kv=self.normal(2, 7, 2, 2, 8),
            causal="bottom_right",
            scale=0.5,
            logit_softcap=2.0,
            bias_kind="post_scale",
            bias=self.normal(1, 4, 5, 7),
            softmax_kind="learnable",
            softmax_offset=self.normal(4),
        )
        forward, backward, d_out = self.step("BSHD_BS2HD", **arguments)
        results = dict(out=forward.out, lse=forward.lse, d_out=d_out)
        for change in (
            {"q": arguments["q"] + 1},
            {"causal": "top_left"},
            {"window": (2, 0)},
            {"scale": 0.7},
            {"logit_softcap": 1.0},
            {"bias_kind": "pre_scale"},
            {"bias": arguments["bias"] + 0.5},
            {"softmax_kind": "off_by_one", "softmax_offset": None},
            {"softmax_offset": arguments["softmax_offset"] + 0.5},
            {"lse": forward.lse + 0.25},
        ):
            with self.subTest(change=[*change]):
                with self.assertRaises(attnd.InvalidArgumentError) as caught:
                    self.client.backward("BSHD_BS2HD", **arguments | results | change)
                self.assertEqual(caught.exception.field, "lse")
        again = self.client.backward("BSHD_BS2HD", **arguments, **results)
        np.testing.assert_array_equal(again.grads.q, backward.grads.q)

    def test_a_bound_far_above_the_lengths_costs_nothing(self):
        arguments = dict(q=self.normal(9, 4, 8), kv=self.normal(12, 2, 2, 8), **LENGTHS)
        forward, expected, d_out = self.step("THD_T2HD", **arguments)
        bounds = dict(max_seqlen_q=2**62, max_seqlen_kv=2**62)
        again = self.client.forward("THD_T2HD", **arguments, **bounds, timeout=30)
        np.testing.assert_array_equal(again.out, forward.out)
        got = self.client.backward(
            "THD_T2HD",
            out=forward.out,
            lse=forward.lse,
            d_out=d_out,
            timeout=30,
            **arguments,
            **bounds,
        )
        self.assert_near(got.grads.q, expected.grads.q.astype(np.float64), 1e-6)
        self.assert_near(got.grads.kv, expected.grads.kv.astype(np.float64), 1e-6)

    def test_reruns_have_the_same_bits(self):
        qkv = self.normal(2, 33, 3, 4, 16)
        arguments = dict(qkv=qkv, causal="top_left", deterministic=True)
        forward, backward, d_out = self.step("BS3HD", **arguments)
        for _ in range(3):
            again = self.client.backward(
                "BS3HD", out=forward.out, lse=forward.lse, d_out=d_out, **arguments
            )
            self.assertEqual(again.grads.qkv.tobytes(), backward.grads.qkv.tobytes())


class RetainedTest(unittest.TestCase):
    """Backward from what Forward left on the server."""

    def setUp(self):
        self.rng = np.random.default_rng(9)

    def normal(self, *shape):
        return self.rng.standard_normal(shape).astype(np.float32)

    def start(self, *arguments):
        server = self.enterContext(ServerProcess(arguments=arguments))
        return self.enterContext(attnd.Client(server.address, timeout=60))

    def test_a_context_is_all_that_was_resent(self):
        client = self.start("--advertise=attnd.example:50051")
        q, kv = self.normal(9, HEADS, DIM), self.normal(12, 2, KV_HEADS, DIM)
        arguments = dict(
            q=q,
            kv=kv,
            causal="bottom_right",
            logit_softcap=2.0,
            softmax_kind="learnable",
            softmax_offset=self.normal(HEADS),
            bias_kind="post_scale",
            bias=self.normal(2, HEADS, 6, 7),
            max_seqlen_q=6,
            max_seqlen_kv=7,
            dropout=attnd.Dropout(0.2, seed=4),
            **LENGTHS,
        )
        forward = client.forward("THD_T2HD", return_lse=True, retain_for_backward=60.0, **arguments)
        self.assertEqual(forward.context.owner, "attnd.example:50051")
        for _ in range(2):  # The second Backward of a context works as the first.
            d_out = self.normal(*forward.out.shape)
            resent = client.backward(
                "THD_T2HD", out=forward.out, lse=forward.lse, d_out=d_out, **arguments
            )
            retained = client.backward_of(forward.context, d_out=d_out)
            for name in ("q", "kv"):
                expected = getattr(resent.grads, name)
                self.assertGreater(np.abs(expected).max(), 0.1)
                self.assertEqual(getattr(retained.grads, name).tobytes(), expected.tobytes())
            for name in ("d_bias", "d_softmax_offset"):
                expected = getattr(resent, name)
                self.assertEqual(getattr(retained, name).tobytes(), expected.tobytes())

    def test_the_lse_is_retained_whether_it_is_returned_or_not(self):
        client = self.start()
        qkv = self.normal(1, 6, 3, HEADS, DIM)
        forward = client.forward("BS3HD", qkv=qkv, retain_for_backward=60.0)
        self.assertIsNone(forward.lse)
        self.assertIsNone(client.forward("BS3HD", qkv=qkv).context)
        d_out = self.normal(1, 6, HEADS, DIM)
        got = client.backward_of(forward.context, d_out=d_out).grads.qkv[0]
        gradients = attention_oracle.Attention(*qkv[0].swapaxes(0, 1)).backward(d_out[0])
        for slot, name in enumerate("qkv"):
            np.testing.assert_allclose(got[:, slot], gradients[name], atol=1e-4)

    def test_a_wrong_d_out_leaves_the_context_alone(self):
        client = self.start()
        qkv = self.normal(1, 6, 3, HEADS, DIM)
        context = client.forward("BS3HD", qkv=qkv, retain_for_backward=60.0).context
        for wrong in (
            self.normal(1, 6, HEADS, DIM + 1),
            self.normal(1, 6, HEADS, DIM).astype("f2"),
        ):
            with self.assertRaises(attnd.InvalidArgumentError) as caught:
                client.backward_of(context, d_out=wrong)
            self.assertTrue(caught.exception.field.startswith("d_out"), caught.exception.field)
        d_out = self.normal(1, 6, HEADS, DIM)
        self.assertTrue(np.any(client.backward_of(context, d_out=d_out).grads.qkv))

    def test_a_context_of_another_generation_is_none(self):
        client = self.start()
        qkv = self.normal(1, 6, 3, HEADS, DIM)
        context = client.forward("BS3HD", qkv=qkv, retain_for_backward=60.0).context
        with self.assertRaises(attnd.FailedPreconditionError) as caught:
            other = dataclasses.replace(context, generation=1)
            client.backward_of(other, d_out=self.normal(1, 6, HEADS, DIM))
        self.assertEqual(caught.exception.field, "context.generation")

    def test_a_lease_ends_and_its_memory_comes_back(self):
        client = self.start("--pinned-pool=8MiB")
        qkv = self.normal(1, 16, 3, 32, 256)  # 1.5 MiB, and 0.5 MiB of O.
        d_out = self.normal(1, 16, 32, 256)
        contexts = []
        lease = 2.0
        with self.assertRaises(attnd.ResourceExhaustedError):
            for _ in range(8):
                forward = client.forward("BS3HD", qkv=qkv, retain_for_backward=lease)
                contexts.append(forward.context)
        self.assertGreaterEqual(len(contexts), 2)
        self.assertEqual(len({context.id for context in contexts}), len(contexts))
        time.sleep(lease + 0.1)
        for context in contexts:
            with self.assertRaises(attnd.FailedPreconditionError) as caught:
                client.backward_of(context, d_out=d_out)
            self.assertEqual(caught.exception.field, "context")
        context = client.forward("BS3HD", qkv=qkv, retain_for_backward=60.0).context
        client.backward_of(context, d_out=d_out)

    def test_a_lease_is_no_longer_than_the_server_allows(self):
        client = self.start("--max-lease=90s")
        qkv = self.normal(1, 6, 3, HEADS, DIM)
        for lease in (90.5, 1e300):
            with self.assertRaises(attnd.InvalidArgumentError) as caught:
                client.forward("BS3HD", qkv=qkv, retain_for_backward=lease)
            self.assertEqual(caught.exception.field, "retain_for_backward.seconds")
            self.assertIn("at most 90", str(caught.exception))
        context = client.forward("BS3HD", qkv=qkv, retain_for_backward=90.0).context
        client.backward_of(context, d_out=self.normal(1, 6, HEADS, DIM))

    def test_another_server_has_no_such_context(self):
        qkv = self.normal(1, 6, 3, HEADS, DIM)
        context = self.start().forward("BS3HD", qkv=qkv, retain_for_backward=60.0).context
        with self.assertRaises(attnd.AttndError) as caught:
            self.start().backward_of(context, d_out=self.normal(1, 6, HEADS, DIM))
        codes = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION)
        self.assertIn(caught.exception.code, codes)
        self.assertEqual(caught.exception.field, "context")


if __name__ == "__main__":
    unittest.main()
