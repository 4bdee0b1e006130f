"""The Python client against a real server: python_client_test.py [unittest arguments]."""

import pathlib
import socket
import sys
import tempfile
import unittest

import grpc
import ml_dtypes
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
from server_process import ServerProcess

import attnd
from attnd import errors


def attention(q, k, v, *, scale=None, visible=None):
    """One sequence in float64: q [s_q, h, d_qk], k [s_kv, g, d_qk], v [s_kv, g, d_v], visible
    [s_q, s_kv] -> out [s_q, h, d_v], lse [s_q, h]."""
    group = q.shape[1] // k.shape[1]
    q = q.astype(np.float64)
    k = np.repeat(k.astype(np.float64), group, axis=1)
    v = np.repeat(v.astype(np.float64), group, axis=1)
    logits = np.einsum("ihd,jhd->ijh", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if visible is not None:
        logits[~visible] = -np.inf
    with np.errstate(divide="ignore"):
        lse = np.log(np.exp(logits).sum(axis=1))
    weights = np.exp(logits - np.where(np.isinf(lse), 0, lse)[:, None])
    return np.einsum("ijh,jhd->ihd", weights, v), lse


class PythonClientTest(unittest.TestCase):
    server: ServerProcess
    client: attnd.Client

    @classmethod
    def setUpClass(cls):
        cls.server = cls.enterClassContext(ServerProcess())
        cls.client = cls.enterClassContext(attnd.Client(cls.server.address, timeout=60))

    def setUp(self):
        self.rng = np.random.default_rng(7)

    def normal(self, *shape, dtype=np.float32):
        return self.rng.standard_normal(shape).astype(dtype)

    def test_packed_dense_with_lse(self):
        qkv = self.normal(2, 5, 3, 4, 8)
        result = self.client.forward("BS3HD", qkv=qkv, return_lse=True)
        self.assertEqual(result.out.shape, (2, 5, 4, 8))
        self.assertEqual(result.out.dtype, np.float32)
        self.assertEqual(result.lse.shape, (2, 4, 5))
        for i in range(2):
            out, lse = attention(qkv[i, :, 0], qkv[i, :, 1], qkv[i, :, 2])
            np.testing.assert_allclose(result.out[i], out, atol=1e-5)
            np.testing.assert_allclose(result.lse[i], lse.T, atol=1e-5)
        self.assertEqual(result.info.backend, "cpu")
        self.assertEqual(result.info.transport, "message")
        self.assertGreaterEqual(result.info.batch_size, 1)

    def test_dense_with_lengths_zeroes_the_padding(self):
        qkv = self.normal(2, 6, 3, 2, 8)
        qkv[0, 4:] = np.nan
        cu = [0, 4, 10]
        result = self.client.forward(
            "BS3HD", qkv=qkv, cu_seqlens_q=cu, cu_seqlens_kv=cu, return_lse=True
        )
        out, _ = attention(*(qkv[0, :4, slot] for slot in range(3)))
        np.testing.assert_allclose(result.out[0, :4], out, atol=1e-5)
        np.testing.assert_array_equal(result.out[0, 4:], 0)
        np.testing.assert_array_equal(result.lse[0, :, 4:], -np.inf)

    def test_separate_gqa_with_other_value_dim_and_bottom_right_mask(self):
        q, k, v = self.normal(2, 3, 4, 16), self.normal(2, 7, 2, 16), self.normal(2, 7, 2, 24)
        result = self.client.forward(
            "BSHD_BSHD_BSHD", q=q, k=k, v=v, causal="bottom_right", scale=0.5
        )
        self.assertEqual(result.out.shape, (2, 3, 4, 24))
        self.assertIsNone(result.lse)
        visible = np.tri(3, 7, 4, dtype=bool)
        for i in range(2):
            out, _ = attention(q[i], k[i], v[i], scale=0.5, visible=visible)
            np.testing.assert_allclose(result.out[i], out, atol=1e-5)

    def test_heads_first_with_a_window(self):
        q, k, v = (self.normal(1, 2, 6, 8) for _ in range(3))
        result = self.client.forward("BHSD_BHSD_BHSD", q=q, k=k, v=v, window=(1, 2))
        distance = np.arange(6)[None, :] - np.arange(6)[:, None]
        out, _ = attention(
            *(x[0].swapaxes(0, 1) for x in (q, k, v)), visible=(distance >= -1) & (distance <= 2)
        )
        np.testing.assert_allclose(result.out[0].swapaxes(0, 1), out, atol=1e-5)

    def test_window_without_a_left_bound(self):
        q, k, v = (self.normal(1, 6, 1, 8) for _ in range(3))
        result = self.client.forward("BSHD_BSHD_BSHD", q=q, k=k, v=v, window=(None, 1))
        out, _ = attention(q[0], k[0], v[0], visible=np.tri(6, 6, 1, dtype=bool))
        np.testing.assert_allclose(result.out[0], out, atol=1e-5)

    def test_ragged_with_gaps(self):
        q, kv = self.normal(7, 4, 8), self.normal(9, 2, 2, 8)
        cu_q, cu_kv = np.array([0, 2, 5]), np.array([0, 4, 7])
        result = self.client.forward(
            "THD_T2HD",
            q=q,
            kv=kv,
            cu_seqlens_q=cu_q,
            cu_seqlens_kv=cu_kv,
            cu_seqlens_q_padded=[0, 3, 7],
            cu_seqlens_kv_padded=[1, 6, 9],
            return_lse=True,
        )
        for q_rows, kv_rows in ((slice(0, 2), slice(1, 5)), (slice(3, 6), slice(6, 9))):
            out, lse = attention(q[q_rows], kv[kv_rows, 0], kv[kv_rows, 1])
            np.testing.assert_allclose(result.out[q_rows], out, atol=1e-5)
            np.testing.assert_allclose(result.lse[q_rows], lse, atol=1e-5)
        np.testing.assert_array_equal(result.out[[2, 6]], 0)
        np.testing.assert_array_equal(result.lse[[2, 6]], -np.inf)

    def test_16_bit_types_and_float32_output(self):
        for dtype, tolerance in ((np.float16, 4e-3), (ml_dtypes.bfloat16, 3e-2)):
            with self.subTest(dtype=np.dtype(dtype).name):
                q, k, v = (self.normal(1, 5, 2, 16, dtype=dtype) for _ in range(3))
                expected, _ = attention(q[0], k[0], v[0])
                same = self.client.forward("BSHD_BSHD_BSHD", q=q, k=k, v=v).out
                self.assertEqual(same.dtype, np.dtype(dtype))
                np.testing.assert_allclose(same[0].astype(np.float64), expected, atol=tolerance)
                wide = self.client.forward("BSHD_BSHD_BSHD", q=q, k=k, v=v, out_dtype="float32").out
                self.assertEqual(wide.dtype, np.float32)
                np.testing.assert_allclose(wide[0], expected, atol=tolerance)

    def test_strided_views_of_a_fused_projection(self):
        t, h, g, d = 6, 4, 2, 8
        qkv = self.normal(t, h + 2 * g, d)
        strides = ((h + 2 * g) * d, d, 1)
        cu = [0, 2, 6]
        arguments = dict(
            views={
                "q": attnd.View("qkv", 0, strides),
                "k": attnd.View("qkv", 4 * h * d, strides),
                "v": attnd.View("qkv", 4 * (h + g) * d, strides),
            },
            batch=2,
            max_seqlen_q=4,
            max_seqlen_kv=4,
            num_heads=h,
            num_kv_heads=g,
            head_dim_qk=d,
            head_dim_v=d,
            cu_seqlens_q=cu,
            cu_seqlens_kv=cu,
        )
        out = self.client.forward("STRIDED", qkv=qkv, **arguments).out
        for rows in (slice(0, 2), slice(2, 6)):
            q, k, v = np.split(qkv[rows], (h, h + g), axis=1)
            np.testing.assert_allclose(out[rows], attention(q, k, v)[0], atol=1e-5)

    def test_views_of_a_projection_by_groups(self):
        b, s, h, g, d = 2, 5, 6, 2, 8
        shared = h // g
        # [b, s, g, h/g + 2, d], in each order of its rows.
        rows = self.normal(b, s, g, shared + 2, d)
        q = rows[:, :, :, :shared].reshape(b, s, h, d)
        k, v = rows[..., shared, :], rows[..., shared + 1, :]
        expected = np.stack([attention(q[i], k[i], v[i])[0] for i in range(b)])
        sizes = dict(
            batch=b, max_seqlen_q=s, max_seqlen_kv=s, num_heads=h, num_kv_heads=g, head_dim_qk=d, head_dim_v=d
        )
        made = dict(num_heads=h, num_kv_heads=g, head_dim=d, dtype=np.float32)
        cu = np.arange(b + 1) * s
        tokens = dict(cu_seqlens_q=cu, cu_seqlens_kv=cu)
        cases = {
            "[s, b, ..]": (rows.swapaxes(0, 1), attnd.views.megatron(batch=b, **made), {}),
            "[b, s, ..]": (rows, attnd.views.megatron(seqlen=s, **made), {}),
            "[t, ..]": (rows.reshape(b * s, g, shared + 2, d), attnd.views.megatron(**made), tokens),
        }
        d_out = self.normal(b, s, h, d)
        plain = self.client.backward_of(
            self.client.forward("BSHD_BSHD_BSHD", q=q, k=k, v=v, retain_for_backward=60).context, d_out=d_out
        ).grads
        for name, (qkv, views, lengths) in cases.items():
            with self.subTest(name):
                arguments = dict(qkv=np.ascontiguousarray(qkv), views=views, **sizes, **lengths)
                result = self.client.forward("STRIDED", retain_for_backward=60, **arguments)
                np.testing.assert_allclose(result.out.reshape(b, s, h, d), expected, atol=1e-5)
                d_o = d_out.reshape(result.out.shape)
                grads = self.client.backward_of(result.context, d_out=d_o).grads.qkv
                grads = grads.swapaxes(0, 1) if name == "[s, b, ..]" else grads.reshape(rows.shape)
                got = grads[:, :, :, :shared].reshape(b, s, h, d)
                np.testing.assert_allclose(got, plain.q, atol=1e-5)
                np.testing.assert_allclose(grads[..., shared, :], plain.k, atol=1e-5)
                np.testing.assert_allclose(grads[..., shared + 1, :], plain.v, atol=1e-5)
                plan = self.client.plan("STRIDED", **arguments)
                self.assertEqual(plan.resolved["q"].group_stride, (shared + 2) * d)
                self.assertIsNone(plan.resolved["k"].group_stride)

    def test_views_of_sizes_that_contradict_are_refused(self):
        good = dict(num_heads=4, num_kv_heads=2, head_dim=8, dtype=np.float16)
        for bad in ({"num_heads": 5}, {"num_kv_heads": 0}, {"head_dim": -1}, {"batch": 1, "seqlen": 2}):
            with self.subTest(bad), self.assertRaisesRegex(ValueError, next(iter(bad))):
                attnd.views.megatron(**(good | bad))

    def test_paged_keys_and_values(self):
        q = self.normal(2, 1, 2, 8)
        pool_k, pool_v = (self.normal(4, 2, 2, 8) for _ in range(2))
        table = np.array([[3, 0], [2, 1]], dtype=np.int32)
        out = self.client.forward(
            "paged_kv_bshd_bshd_bshd",
            q=q,
            k=pool_k,
            v=pool_v,
            page_table_k=table,
            page_table_v=table,
            cu_seqlens_q=[0, 1, 2],
            cu_seqlens_kv=[0, 3, 7],
        ).out
        for i, length in enumerate((3, 4)):
            k, v = (pool[table[i]].reshape(4, 2, 8)[:length] for pool in (pool_k, pool_v))
            np.testing.assert_allclose(out[i], attention(q[i], k, v)[0], atol=1e-5)

    def test_arrays_that_are_not_contiguous(self):
        wide = self.normal(1, 5, 3, 2, 16)
        out = self.client.forward("BS3HD", qkv=wide[..., ::2]).out
        expected, _ = attention(*(wide[0, :, slot, :, ::2] for slot in range(3)))
        np.testing.assert_allclose(out[0], expected, atol=1e-5)

    def test_sequences_without_a_single_token(self):
        qkv = self.normal(0, 3, 2, 8)
        result = self.client.forward(
            "T3HD", qkv=qkv, cu_seqlens_q=[0, 0], cu_seqlens_kv=[0, 0], return_lse=True
        )
        self.assertEqual(result.out.shape, (0, 2, 8))
        self.assertEqual(result.lse.shape, (0, 2))

    def test_messages_above_the_default_limit_of_grpc(self):
        qkv = self.normal(1, 512, 3, 8, 128)  # 6 MiB in, 2 MiB out
        out = self.client.forward("BS3HD", qkv=qkv, causal="top_left").out
        rows = np.array([0, 100, 511])
        for row in rows:
            keys = slice(0, row + 1)
            expected, _ = attention(qkv[0, [row], 0], qkv[0, keys, 1], qkv[0, keys, 2])
            np.testing.assert_allclose(out[0, [row]], expected, atol=1e-5)

    def test_plan_of_shapes_says_where_the_tensors_lie(self):
        plan = self.client.plan("BS3HD", qkv=(2, 5, 3, 4, 8), dtype=np.float32)
        self.assertTrue(plan.supported, plan.reason)
        self.assertEqual(plan.backend, "cpu")
        strides = (5 * 3 * 4 * 8, 3 * 4 * 8, 8, 1)
        self.assertEqual(plan.resolved["q"], attnd.View("qkv", 0, strides))
        self.assertEqual(plan.resolved["k"], attnd.View("qkv", 4 * 8 * 4, strides))
        self.assertEqual(plan.resolved["v"], attnd.View("qkv", 2 * 4 * 8 * 4, strides))
        self.assertEqual(plan.resolved["out"], attnd.View("out", 0, (5 * 4 * 8, 4 * 8, 8, 1)))

    def test_plan_of_arrays_refuses_as_forward_does(self):
        arguments = dict(qkv=self.normal(2, 5, 4, 8))
        for call in (self.client.forward, self.client.plan):
            with self.subTest(call=call.__name__):
                with self.assertRaises(attnd.InvalidArgumentError) as caught:
                    call("BS3HD", **arguments)
                self.assertEqual(caught.exception.code, grpc.StatusCode.INVALID_ARGUMENT)
                self.assertEqual(caught.exception.field, "inputs.qkv")
                self.assertEqual(caught.exception.reason, "SHAPE_MISMATCH")
                self.assertIn("inputs.qkv", caught.exception.message)

    def test_decreasing_lengths_name_their_field(self):
        with self.assertRaises(attnd.InvalidArgumentError) as caught:
            self.client.forward(
                "T3HD",
                qkv=self.normal(4, 3, 2, 8),
                cu_seqlens_q=[0, 3, 2],
                cu_seqlens_kv=[0, 3, 2],
            )
        self.assertEqual(caught.exception.field, "sequences.cu_seqlens_q")
        self.assertIsNone(caught.exception.retry_after)

    def test_surplus_buffer_names_its_field(self):
        x = self.normal(1, 4, 2, 8)
        with self.assertRaises(attnd.InvalidArgumentError) as caught:
            self.client.forward("BSHD_BSHD_BSHD", q=x, k=x, v=x, kv=x)
        self.assertEqual(caught.exception.field, "inputs.kv")
        self.assertEqual(caught.exception.reason, "MISPLACED_FIELD")

    def test_unsupported_layout_is_unimplemented_and_planned_as_unsupported(self):
        pool = self.normal(4, 2, 2, 8)
        out = self.normal(2, 1, 2, 8)
        arguments = dict(
            q=self.normal(2, 1, 2, 8),
            k=pool,
            v=pool,
            page_table_k=np.array([[3, 0], [2, 1]], dtype=np.int32),
            page_table_v=np.array([[3, 0], [2, 1]], dtype=np.int32),
            cu_seqlens_q=[0, 1, 2],
            cu_seqlens_kv=[0, 3, 7],
        )
        layout = "PAGED_KV_BSHD_BSHD_BSHD"
        with self.assertRaises(attnd.UnimplementedError) as caught:
            self.client.backward(layout, out=out, lse=self.normal(2, 2, 1), d_out=out, **arguments)
        self.assertEqual(caught.exception.field, "spec.layout")
        plan = self.client.plan(layout, backward=True, **arguments)
        self.assertFalse(plan.supported)
        self.assertIn("spec.layout", plan.reason)
        self.assertTrue(self.client.plan(layout, **arguments).supported)

    def test_sinks_biases_and_dropout(self):
        q, k, v = self.normal(1, 4, 2, 8), self.normal(1, 6, 2, 8), self.normal(1, 6, 2, 8)
        bias, sink = self.normal(1, 2, 1, 6), self.normal(2)
        arguments = dict(q=q, k=k, v=v, return_lse=True)
        result = self.client.forward(
            "BSHD_BSHD_BSHD",
            bias_kind="post_scale",
            bias=np.broadcast_to(bias, (1, 2, 4, 6)),
            softmax_kind="learnable",
            softmax_offset=sink,
            **arguments,
        )
        logits = np.einsum("ihd,jhd->hij", q[0].astype("f8"), k[0].astype("f8")) * 8**-0.5
        exponentials = np.exp(logits + bias[0])
        denominator = exponentials.sum(axis=-1) + np.exp(sink.astype("f8"))[:, None]
        out = np.einsum("hij,jhd->ihd", exponentials / denominator[..., None], v[0])
        np.testing.assert_allclose(result.out[0], out, atol=1e-5)
        np.testing.assert_allclose(result.lse[0], np.log(denominator), atol=1e-5)
        self.assertIsNone(result.rng)
        dropout = attnd.Dropout(0.5, seed=3, offset=9)
        dropped = self.client.forward("BSHD_BSHD_BSHD", dropout=dropout, **arguments)
        self.assertEqual(dropped.rng, dropout)
        again = self.client.forward("BSHD_BSHD_BSHD", dropout=dropout, **arguments)
        np.testing.assert_array_equal(dropped.out, again.out)
        whole = self.client.forward("BSHD_BSHD_BSHD", **arguments)
        self.assertGreater(np.abs(dropped.out - whole.out).max(), 0.1)
        np.testing.assert_allclose(dropped.lse, whole.lse, atol=1e-6)

    def test_alibi_of_a_shard(self):
        qkv = self.normal(1, 5, 3, 4, 8)
        whole = self.client.forward("BS3HD", qkv=qkv, bias_kind="alibi").out
        shard = self.client.forward(
            "BS3HD", qkv=np.ascontiguousarray(qkv[:, :, :, 2:]), bias_kind="alibi", alibi=(2, 4)
        ).out
        np.testing.assert_allclose(shard, whole[:, :, 2:], atol=1e-6)

    def test_gradients_have_the_names_of_the_buffers(self):
        q, kv = self.normal(2, 5, 4, 8), self.normal(2, 7, 2, 2, 8)
        attention = dict(q=q, kv=kv, causal="bottom_right", deterministic=True)
        forward = self.client.forward("BSHD_BS2HD", return_lse=True, **attention)
        result = self.client.backward(
            "BSHD_BS2HD", out=forward.out, lse=forward.lse, d_out=forward.out, **attention
        )
        self.assertEqual(result.grads.q.shape, q.shape)
        self.assertEqual(result.grads.kv.shape, kv.shape)
        for absent in (result.grads.qkv, result.grads.k, result.grads.v, result.d_bias):
            self.assertIsNone(absent)
        self.assertIsNone(result.d_softmax_offset)
        self.assertEqual(result.info.backend, "cpu")
        # dV weighs dO by the weights, and those of a query add up to 1.
        np.testing.assert_allclose(
            result.grads.kv[:, :, 1].sum(axis=(1, 2)), forward.out.sum(axis=(1, 2)), atol=1e-4
        )

    def test_gradients_of_bias_and_sinks(self):
        x = self.normal(1, 4, 2, 8)
        attention = dict(
            q=x,
            k=x,
            v=x,
            bias_kind="pre_scale",
            bias=self.normal(1, 1, 4, 4),
            softmax_kind="learnable",
            softmax_offset=self.normal(2),
        )
        forward = self.client.forward("BSHD_BSHD_BSHD", return_lse=True, **attention)
        result = self.client.backward(
            "BSHD_BSHD_BSHD", out=forward.out, lse=forward.lse, d_out=x, **attention
        )
        self.assertEqual(result.d_bias.shape, (1, 1, 4, 4))
        self.assertEqual(result.d_softmax_offset.shape, (2,))
        # A constant added to all logits, the sink's too, changes nothing.
        d_logits = np.sum(result.d_bias) / 8**-0.5
        self.assertAlmostEqual(d_logits + np.sum(result.d_softmax_offset), 0, places=4)
        self.assertGreater(np.abs(result.d_softmax_offset).max(), 1e-3)

    def test_backward_takes_what_forward_returned(self):
        qkv = self.normal(1, 4, 3, 2, 8)
        forward = self.client.forward("BS3HD", qkv=qkv, return_lse=True)
        given = dict(qkv=qkv, out=forward.out, lse=forward.lse, d_out=forward.out)
        for name, wrong in (
            ("out", forward.out[:, :3]),
            ("lse", forward.lse.swapaxes(1, 2)),
            ("d_out", forward.out[..., :4]),
        ):
            with self.subTest(name=name), self.assertRaises(attnd.InvalidArgumentError) as caught:
                self.client.backward("BS3HD", **given | {name: wrong})
            self.assertEqual(caught.exception.field, name)
        for surplus in ({"return_lse": True}, {"out_dtype": "float32"}, {"d_out": (1, 4, 2, 8)}):
            with self.subTest(surplus=surplus), self.assertRaises(TypeError):
                self.client.backward("BS3HD", **given | surplus)

    def test_what_no_message_can_say_is_refused_at_once(self):
        x = self.normal(1, 4, 2, 8)
        for expected, arguments in (
            (TypeError, dict(layout="BSHD_BSHD_BSHD", q=x, k=x, v=x, colour="red")),
            (TypeError, dict(layout="BSHD_BSHD_BSHD", q=(1, 4, 2, 8), k=x, v=x)),
            (TypeError, dict(layout="BSHD_BSHD_BSHD", q=x.astype(np.float64), k=x, v=x)),
            (TypeError, dict(layout="BSHD_BSHD_BSHD")),
            (ValueError, dict(layout="SBHB", q=x)),
            (ValueError, dict(layout="BSHD_BSHD_BSHD", q=x, k=x, v=x, causal="diagonal")),
        ):
            with self.subTest(arguments=sorted(arguments)), self.assertRaises(expected):
                self.client.forward(**arguments)

    def test_capabilities(self):
        capabilities = self.client.capabilities()
        self.assertIn("attnd", capabilities.versions)
        self.assertEqual(capabilities.lse_base, "e")
        self.assertTrue(capabilities.incarnation)
        self.assertEqual(capabilities.limits.values_elements, 4096)
        cpu = next(backend for backend in capabilities.backends if backend.name == "cpu")
        self.assertLessEqual({"FLOAT32", "FLOAT16", "BFLOAT16"}, set(cpu.dtypes))
        self.assertLessEqual({"BS3HD", "THD_TH2D", "STRIDED"}, set(cpu.layouts))
        self.assertGreaterEqual(cpu.devices[0].compute_units, 1)

    def test_health(self):
        self.assertEqual(self.client.health(), "SERVING")
        with self.assertRaises(attnd.NotFoundError):
            self.client.health("no.such.Service")

    def test_timeout(self):
        with self.assertRaises(attnd.DeadlineExceededError) as caught:
            self.client.forward("BS3HD", qkv=self.normal(1, 256, 3, 4, 64), timeout=1e-6)
        self.assertEqual(caught.exception.code, grpc.StatusCode.DEADLINE_EXCEEDED)


class WithoutServerTest(unittest.TestCase):
    def test_nobody_listens(self):
        with socket.socket() as unused:  # Bound, never listening: nobody else gets the port.
            unused.bind(("127.0.0.1", 0))
            with attnd.Client(f"127.0.0.1:{unused.getsockname()[1]}", timeout=10) as client:
                with self.assertRaises(attnd.UnavailableError) as caught:
                    client.health()
        self.assertEqual(caught.exception.reason, "")

    def test_unix_socket(self):
        with tempfile.TemporaryDirectory() as folder:
            address = f"unix:{folder}/attnd.sock"
            with ServerProcess(listen=[address]) as server:
                self.assertEqual(server.address, address)
                with attnd.Client(server.address, timeout=10) as client:
                    self.assertEqual(client.health(), "SERVING")


class ErrorDetailsTest(unittest.TestCase):
    """from_rpc_error alone, for details that a healthy server does not send on demand."""

    class RpcError(grpc.RpcError):
        def __init__(self, code, trailing_metadata):
            super().__init__()
            self._code = code
            self._trailing_metadata = trailing_metadata

        def code(self):
            return self._code

        def details(self):
            return "the queue is full"

        def trailing_metadata(self):
            return self._trailing_metadata

    def test_retry_after_and_reason(self):
        status = errors.status_pb2.Status(code=8, message="the queue is full")
        details = errors.error_details_pb2
        retry = details.RetryInfo()
        retry.retry_delay.FromMilliseconds(1500)
        foreign = details.ErrorInfo(reason="PROXY", domain="example.org")
        own = details.ErrorInfo(reason="QUEUE_FULL", domain="attnd")
        for detail in (own, foreign, retry):
            status.details.add().Pack(detail)
        error = errors.from_rpc_error(
            self.RpcError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                (("grpc-status-details-bin", status.SerializeToString()),),
            )
        )
        self.assertIsInstance(error, attnd.ResourceExhaustedError)
        self.assertEqual(error.retry_after, 1.5)
        self.assertEqual(error.reason, "QUEUE_FULL")
        self.assertEqual(str(error), "RESOURCE_EXHAUSTED: the queue is full")

    def test_every_code_has_its_class(self):
        for code, expected in (
            (grpc.StatusCode.ABORTED, attnd.AbortedError),
            (grpc.StatusCode.CANCELLED, attnd.CancelledError),
            (grpc.StatusCode.FAILED_PRECONDITION, attnd.FailedPreconditionError),
            (grpc.StatusCode.INTERNAL, attnd.InternalError),
            (grpc.StatusCode.OUT_OF_RANGE, attnd.OutOfRangeError),
            (grpc.StatusCode.PERMISSION_DENIED, attnd.PermissionDeniedError),
            (grpc.StatusCode.UNAUTHENTICATED, attnd.UnauthenticatedError),
            (grpc.StatusCode.DATA_LOSS, attnd.AttndError),
        ):
            error = errors.from_rpc_error(self.RpcError(code, ()))
            self.assertIs(type(error), expected)
            self.assertEqual(error.code, code)

    def test_details_that_are_no_status_are_left_alone(self):
        error = errors.from_rpc_error(
            self.RpcError(grpc.StatusCode.INTERNAL, (("grpc-status-details-bin", b"\xff\xff"),))
        )
        self.assertEqual((error.field, error.reason, error.retry_after), ("", "", None))


if __name__ == "__main__":
    unittest.main(verbosity=2)
