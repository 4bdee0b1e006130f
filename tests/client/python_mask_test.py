"""Boolean masks of the Python client, against a real server: python_mask_test.py."""

import pathlib
import sys
import unittest

import ml_dtypes
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
import attention_oracle
from server_process import ServerProcess

import attnd
from attnd import arguments

B, H, G, S_Q, S_KV, D = 2, 4, 2, 5, 7, 8
FORMS = ((S_Q, S_KV), (1, S_KV), (H, S_Q, S_KV), (1, 1, 1, S_KV), (B, 1, 1, S_KV))
FORMS += ((B, 1, S_Q, S_KV), (1, H, S_Q, S_KV), (B, H, S_Q, S_KV), (B, H, 1, S_KV))


class MaskTest(unittest.TestCase):
    server: ServerProcess
    client: attnd.Client

    @classmethod
    def setUpClass(cls):
        cls.server = cls.enterClassContext(ServerProcess())
        cls.client = cls.enterClassContext(attnd.Client(cls.server.address, timeout=60))

    def setUp(self):
        self.rng = np.random.default_rng(16)

    def normal(self, *shape, dtype=np.float32):
        return self.rng.standard_normal(shape).astype(dtype)

    def mask(self, *shape):
        """About half True; every row sees one key at least."""
        mask = self.rng.random(shape) < 0.5
        seen = self.rng.integers(shape[-1], size=(*shape[:-1], 1))
        np.put_along_axis(mask, seen, True, axis=-1)
        return mask

    def dense(self, dtype=np.float32):
        """Buffers of BSHD_BSHD_BSHD."""
        kv = (B, S_KV, G, D)
        return dict(
            q=self.normal(B, S_Q, H, D, dtype=dtype),
            k=self.normal(*kv, dtype=dtype),
            v=self.normal(*kv, dtype=dtype),
        )

    def oracles(self, q, k, v, mask, **features):
        """One oracle for each sequence of dense buffers, with the cells that the mask shows."""
        cells = np.broadcast_to(mask, (B, H, S_Q, S_KV))
        return [
            attention_oracle.Attention(q[i], k[i], v[i], visible=cells[i], **features)
            for i in range(B)
        ]

    def assert_near(self, got, want, tolerance=1e-5):
        np.testing.assert_allclose(
            np.asarray(got, np.float64), want, rtol=tolerance, atol=tolerance
        )

    def test_forward_attends_where_the_mask_is_true(self):
        buffers = self.dense()
        for form in FORMS:
            with self.subTest(form=form):
                mask = self.mask(*form)
                result = self.client.forward(
                    "BSHD_BSHD_BSHD", mask=mask, return_lse=True, **buffers
                )
                for i, oracle in enumerate(self.oracles(**buffers, mask=mask)):
                    self.assert_near(result.out[i], oracle.out)
                    self.assert_near(result.lse[i], oracle.lse.T)

    def test_16_bit_types(self):
        mask = self.mask(B, 1, S_Q, S_KV)
        for dtype, tolerance in ((np.float16, 4e-3), (ml_dtypes.bfloat16, 3e-2)):
            with self.subTest(dtype=np.dtype(dtype).name):
                buffers = self.dense(dtype)
                out = self.client.forward("BSHD_BSHD_BSHD", mask=mask, **buffers).out
                for i, oracle in enumerate(self.oracles(**buffers, mask=mask)):
                    self.assert_near(out[i], oracle.out, tolerance)

    def test_a_row_that_sees_nothing_is_empty(self):
        buffers = self.dense()
        mask = self.mask(1, 1, S_Q, S_KV)
        mask[..., 2, :] = False
        result = self.client.forward("BSHD_BSHD_BSHD", mask=mask, return_lse=True, **buffers)
        np.testing.assert_array_equal(result.out[:, 2], 0)
        np.testing.assert_array_equal(result.lse[:, :, 2], -np.inf)
        for i, oracle in enumerate(self.oracles(**buffers, mask=mask)):
            self.assert_near(result.out[i], oracle.out)
        forward = dict(out=result.out, lse=result.lse, d_out=self.normal(*result.out.shape))
        grads = self.client.backward("BSHD_BSHD_BSHD", mask=mask, **forward, **buffers).grads
        np.testing.assert_array_equal(grads.q[:, 2], 0)
        for i, oracle in enumerate(self.oracles(**buffers, mask=mask)):
            for name, want in oracle.backward(forward["d_out"][i]).items():
                if name in "qkv":
                    self.assert_near(getattr(grads, name)[i], want, 3e-5)

    def test_gradients(self):
        buffers = self.dense()
        for form in FORMS:
            with self.subTest(form=form):
                given = dict(mask=self.mask(*form), **buffers)
                forward = self.client.forward("BSHD_BSHD_BSHD", return_lse=True, **given)
                d_out = self.normal(*forward.out.shape)
                result = self.client.backward(
                    "BSHD_BSHD_BSHD", out=forward.out, lse=forward.lse, d_out=d_out, **given
                )
                self.assertIsNone(result.d_bias)
                for i, oracle in enumerate(self.oracles(**given)):
                    for name, want in oracle.backward(d_out[i]).items():
                        if name in "qkv":
                            self.assert_near(getattr(result.grads, name)[i], want, 3e-5)

    def test_a_retained_forward_keeps_its_mask(self):
        given = dict(mask=self.mask(B, 1, S_Q, S_KV), **self.dense())
        forward = self.client.forward("BSHD_BSHD_BSHD", retain_for_backward=60, **given)
        d_out = self.normal(*forward.out.shape)
        grads = self.client.backward_of(forward.context, d_out=d_out).grads
        for i, oracle in enumerate(self.oracles(**given)):
            self.assert_near(grads.k[i], oracle.backward(d_out[i])["k"], 3e-5)

    def test_beside_a_causal_mask_a_soft_cap_and_sinks(self):
        buffers, sink = self.dense(), self.normal(H)
        mask = self.mask(S_Q, S_KV)
        mask[:, 0] = True
        result = self.client.forward(
            "BSHD_BSHD_BSHD",
            mask=mask,
            causal="top_left",
            logit_softcap=2.0,
            softmax_kind="learnable",
            softmax_offset=sink,
            return_lse=True,
            **buffers,
        )
        visible = mask & np.tri(S_Q, S_KV, dtype=bool)
        for i, oracle in enumerate(self.oracles(**buffers, mask=visible, softcap=2.0, sink=sink)):
            self.assert_near(result.out[i], oracle.out)
            self.assert_near(result.lse[i], oracle.lse.T)

    def test_ragged_rows_count_from_their_sequences_start(self):
        q, kv = self.normal(5, H, D), self.normal(9, 2, G, D)
        cu_q, cu_kv = (0, 2, 5), (0, 4, 9)
        mask = self.mask(2, 1, 3, 5)  # The longest of each side.
        mask[0, :, :, 0] = True  # Of its 5 keys the first sequence has 4.
        out = self.client.forward(
            "THD_T2HD", q=q, kv=kv, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, mask=mask
        ).out
        for i in range(2):
            rows, keys = slice(*cu_q[i : i + 2]), slice(*cu_kv[i : i + 2])
            visible = mask[i, 0, : rows.stop - rows.start, : keys.stop - keys.start]
            oracle = attention_oracle.Attention(q[rows], kv[keys, 0], kv[keys, 1], visible=visible)
            self.assert_near(out[rows], oracle.out)

    def test_plan_of_arrays_and_of_shapes(self):
        mask = np.broadcast_to(self.mask(S_Q, S_KV), (B, H, S_Q, S_KV))
        for given in (
            dict(mask=mask, **self.dense()),
            dict(
                mask=(B, 1, S_Q, S_KV),
                q=(B, S_Q, H, D),
                k=(B, S_KV, G, D),
                v=(B, S_KV, G, D),
                dtype=np.float32,
            ),
        ):
            plan = self.client.plan("BSHD_BSHD_BSHD", **given)
            self.assertTrue(plan.supported, plan.reason)
        with self.assertRaises(TypeError):
            self.client.forward("BSHD_BSHD_BSHD", mask=(B, 1, S_Q, S_KV), **self.dense())


class MessageTest(unittest.TestCase):
    """What the client makes of a mask, without a server."""

    QKV = dict(
        q=np.zeros((B, S_Q, H, D), np.float16),
        k=np.zeros((B, S_KV, G, D), np.float16),
        v=np.zeros((B, S_KV, G, D), np.float16),
    )

    def bias(self, mask, **given):
        fields = arguments.forward_fields(
            "BSHD_BSHD_BSHD", self.QKV | given | {"mask": mask}, with_data=True
        )
        self.assertEqual(fields["spec"].bias_kind, arguments.types_pb2.BIAS_KIND_POST_SCALE)
        return arguments.tensors.decode(fields["bias"])

    def test_true_is_0_and_false_is_minus_infinity(self):
        mask = np.arange(S_KV) % 3 == 0
        bias = self.bias(mask[None, None, None])
        self.assertEqual((bias.shape, bias.dtype), ((1, 1, 1, S_KV), np.float16))
        np.testing.assert_array_equal(bias[0, 0, 0], np.where(mask, 0, -np.inf))

    def test_what_is_repeated_in_memory_is_sent_once(self):
        mask = np.tri(S_Q, S_KV, dtype=bool)
        rows = np.ones((B, 1, 1, S_KV), dtype=bool)
        whole = (B, H, S_Q, S_KV)
        for given, want in (
            (mask, (1, 1, S_Q, S_KV)),
            (np.broadcast_to(mask, whole), (1, 1, S_Q, S_KV)),
            (np.broadcast_to(rows, whole), (B, 1, 1, S_KV)),
            (np.broadcast_to(True, whole), (1, 1, 1, S_KV)),
            (np.broadcast_to(mask, whole).copy(), whole),
            (np.swapaxes(np.broadcast_to(mask.T, (H, S_KV, S_Q)), 1, 2), (1, 1, S_Q, S_KV)),
        ):
            bias = self.bias(given)
            self.assertEqual(bias.shape, want)
            np.testing.assert_array_equal(
                np.broadcast_to(bias == 0, whole), np.broadcast_to(given, whole)
            )

    def test_other_shapes_are_refused_with_the_axis(self):
        form = f"[1|b = {B}, 1|h = {H}, 1|s_q = {S_Q}, s_kv = {S_KV}]"
        for shape, parts in (
            ((S_Q, 6), ("axis 1 is 6 and must be s_kv, 7;",)),
            ((S_Q, 1), ("axis 1 is 1 and must be s_kv, 7;",)),
            ((S_KV, S_Q), ("axis 0 is 7 and must be 1 or s_q, 5;",)),
            ((B, S_Q, S_KV), ("axis 0 is 2 and must be 1 or h, 4;",)),
            ((3, 1, S_Q, S_KV), ("axis 0 is 3 and must be 1 or b, 2;",)),
            ((B, G, S_Q, S_KV), ("axis 1 is 2 and must be 1 or h, 4;",)),
            ((S_KV,), ("of rank 1",)),
            ((1, B, H, S_Q, S_KV), ("of rank 5",)),
        ):
            with self.subTest(shape=shape), self.assertRaises(ValueError) as caught:
                self.bias(np.ones(shape, dtype=bool))
            for part in (f"mask has shape {list(shape)}", form, *parts):
                self.assertIn(part, str(caught.exception))

    def test_sizes_come_from_every_kind_of_layout(self):
        cu = dict(cu_seqlens_q=[0, 3, 5], cu_seqlens_kv=[0, 2, 6])
        pool, tokens = np.zeros((9, 2, 2, 8), np.float32), np.zeros((5, 4, 8), np.float32)
        for layout, given, want in (
            ("sb3hd", dict(qkv=np.zeros((6, 2, 3, 4, 8), np.float32)), (2, 4, 6, 6)),
            ("BHSD_BHSD_BHSD", dict(q=np.zeros((2, 4, 6, 8), np.float32)), (2, 4, 6, None)),
            ("T3HD", dict(qkv=np.zeros((6, 3, 4, 8), np.float32), **cu), (2, 4, 3, 4)),
            ("PAGED_KV_THD_BSHD_BSHD", dict(q=tokens, k=pool, v=pool, **cu), (2, 4, 3, 4)),
            (
                "STRIDED",
                dict(qkv=tokens, batch=2, num_heads=4, max_seqlen_q=3, max_seqlen_kv=5),
                (2, 4, 3, 5),
            ),
        ):
            for axis, size in enumerate(want):
                if size is None:
                    continue
                shape = [1, 1, 1, want[3] or 7]
                shape[axis] = size + 1
                with (
                    self.subTest(layout=layout, axis=axis),
                    self.assertRaises(ValueError) as caught,
                ):
                    arguments.forward_fields(
                        layout, dict(mask=np.ones(shape, dtype=bool), **given), with_data=True
                    )
                self.assertIn(f"axis {axis} is {size + 1}", str(caught.exception))
                shape[axis] = size
                fields = arguments.forward_fields(
                    layout, dict(mask=np.ones(shape, dtype=bool), **given), with_data=True
                )
                self.assertEqual(list(fields["bias"].shape), shape)

    def test_what_no_mask_goes_with(self):
        mask = np.ones((S_Q, S_KV), dtype=bool)
        bias = np.zeros((1, 1, S_Q, S_KV), np.float16)
        e4m3 = {name: array.astype(ml_dtypes.float8_e4m3fn) for name, array in self.QKV.items()}
        for expected, wrong, given in (
            (TypeError, mask.astype(np.float16), {}),
            (TypeError, mask.astype(np.uint8), {}),
            (TypeError, mask.tolist(), {}),
            (ValueError, mask, dict(bias=bias, bias_kind="post_scale")),
            (ValueError, mask, dict(bias=bias)),
            (ValueError, mask, dict(bias_kind="pre_scale")),
            (ValueError, mask, dict(bias_kind="ALIBI")),
            (ValueError, mask, e4m3),
        ):
            with self.subTest(given=sorted(given)), self.assertRaises(expected) as caught:
                self.bias(wrong, **given)
            self.assertIn("mask", str(caught.exception))
        self.assertEqual(self.bias(mask, bias_kind="none").shape, bias.shape)


if __name__ == "__main__":
    unittest.main(verbosity=2)
