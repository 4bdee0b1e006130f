"""FP8 through the whole service against NumPy: fp8_test.py."""

import pathlib
import sys
import unittest

import ml_dtypes
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import attention_oracle
from server_process import ServerProcess

import attnd

LARGEST = {ml_dtypes.float8_e4m3fn: 448.0, ml_dtypes.float8_e5m2: 57344.0}
# Relative RMS error of a tensor that is rounded to the type, and of a gradient that needs a rounded
# O as well.
BOUNDS = {ml_dtypes.float8_e4m3fn: (4e-2, 8e-2), ml_dtypes.float8_e5m2: (8e-2, 1.6e-1)}
# One sequence of 9 queries and 13 keys, between rows of nobody that are NaN.
QUERIES, KEYS, HEADS, KV_HEADS, DIM, DIM_V = slice(2, 11), slice(0, 13), 4, 2, 16, 24
ROWS = {
    "cu_seqlens_q": (0, 9),
    "cu_seqlens_kv": (0, 13),
    "cu_seqlens_q_padded": (2, 14),
    "cu_seqlens_kv_padded": (0, 16),
}


def relative_error(got, want):
    return np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2))


class Problem:
    """Tensors of unit variance, and how they are stored.

    Attributes:
      arguments: of forward.
      oracle: of the real values.
      scales: of both passes, such that what is computed uses half of the type's range.
      d_out, real_d_out: the gradient of O as it is stored, and its rows of the sequence.
    """

    def __init__(self, dtype):
        rng = np.random.default_rng(5)
        self.dtype, self.scales = dtype, {}
        shapes = {"q": (14, HEADS, DIM), "k": (16, KV_HEADS, DIM), "v": (16, KV_HEADS, DIM_V)}
        stored, real = {}, {}
        for name, shape in (*shapes.items(), ("d_o", (14, HEADS, DIM_V))):
            rows = KEYS if name in ("k", "v") else QUERIES
            descale = np.float32(5.0 / LARGEST[dtype])
            stored[name] = np.full(shape, np.nan).astype(dtype)
            stored[name][rows] = (rng.standard_normal(shape)[rows] / descale).astype(dtype)
            real[name] = stored[name][rows].astype(np.float64) * descale
            self.scales[f"descale_{name}"] = descale
        visible = np.tri(9, 13, 4, dtype=bool)
        self.d_out, self.real_d_out = stored.pop("d_o"), real.pop("d_o")
        self.oracle = attention_oracle.Attention(**real, visible=visible)
        self.gradients = self.oracle.backward(self.real_d_out)
        fit = lambda array: np.float32(0.5 * LARGEST[dtype] / np.abs(array).max())
        self.scales["scale_o"] = fit(self.oracle.out)
        self.scales["descale_o"] = 1 / self.scales["scale_o"]
        for name in "qkv":
            self.scales[f"scale_d_{name}"] = fit(self.gradients[name])
        self.arguments = {**stored, **ROWS, "causal": "bottom_right"}


class Fp8Test(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        server = cls.enterClassContext(ServerProcess())
        cls.client = cls.enterClassContext(attnd.Client(server.address, timeout=60))

    def forward(self, problem, **more):
        arguments = {"fp8": problem.scales, "return_lse": True, **problem.arguments, **more}
        return self.client.forward("THD_THD_THD", **arguments)

    def check_rows(self, array, rows, scale, want, bound):
        self.assertLess(relative_error(array[rows].astype(np.float64) / scale, want), bound)
        outside = np.delete(array, np.r_[rows], axis=0).astype(np.float64)
        np.testing.assert_array_equal(outside, 0)

    def test_forward_and_backward(self):
        for dtype in LARGEST:
            with self.subTest(dtype=dtype.__name__):
                problem = Problem(dtype)
                result = self.forward(problem)
                self.assertEqual(result.out.dtype, dtype)
                rounded, with_out = BOUNDS[dtype]
                scales = problem.scales
                self.check_rows(result.out, QUERIES, scales["scale_o"], problem.oracle.out, rounded)
                np.testing.assert_allclose(result.lse[QUERIES], problem.oracle.lse, atol=1e-5)
                self.assertEqual(result.amax.keys(), {"s", "o"})
                self.assertAlmostEqual(result.amax["s"], problem.oracle.weights.max(), places=5)
                self.assertAlmostEqual(
                    result.amax["o"], np.abs(problem.oracle.out).max(), places=5
                )
                backward = self.client.backward(
                    "THD_THD_THD",
                    out=result.out,
                    lse=result.lse,
                    d_out=problem.d_out,
                    fp8=scales,
                    **problem.arguments,
                )
                for name, rows in (("q", QUERIES), ("k", KEYS), ("v", KEYS)):
                    got, want = getattr(backward.grads, name), problem.gradients[name]
                    self.assertEqual(got.dtype, dtype)
                    self.check_rows(got, rows, scales[f"scale_d_{name}"], want, with_out)
                self.assertEqual(backward.amax.keys(), {"d_p", "d_q", "d_k", "d_v"})
                largest = np.abs(problem.gradients["v"]).max()
                self.assertAlmostEqual(backward.amax["d_v"], largest, places=4)

    def test_out_may_be_float32(self):
        problem = Problem(ml_dtypes.float8_e4m3fn)
        out = self.forward(problem, out_dtype=np.float32).out
        np.testing.assert_allclose(out[QUERIES], problem.oracle.out, atol=1e-5)

    def test_a_context_takes_the_scales_of_its_backward_pass(self):
        problem = Problem(ml_dtypes.float8_e4m3fn)
        first = ("descale_q", "descale_k", "descale_v", "scale_o")
        forward = {name: problem.scales[name] for name in first}
        result = self.forward(problem, fp8=forward, retain_for_backward=60)
        resent = self.client.backward(
            "THD_THD_THD",
            out=result.out,
            lse=result.lse,
            d_out=problem.d_out,
            fp8=problem.scales,
            **problem.arguments,
        )
        retained = self.client.backward_of(
            result.context, d_out=problem.d_out, fp8=problem.scales
        )
        for name in "qkv":
            a, b = getattr(resent.grads, name), getattr(retained.grads, name)
            self.assertEqual(a.tobytes(), b.tobytes())
        self.assertEqual(resent.amax, retained.amax)
        # What O is stored with, the context knows.
        without = {name: x for name, x in problem.scales.items() if name != "descale_o"}
        known = self.client.backward_of(result.context, d_out=problem.d_out, fp8=without)
        np.testing.assert_array_equal(
            known.grads.v.view(np.uint8), retained.grads.v.view(np.uint8)
        )
        self.assertAlmostEqual(known.amax["d_q"], retained.amax["d_q"], places=4)
        with self.assertRaises(attnd.InvalidArgumentError) as refusal:
            self.client.backward_of(
                result.context, d_out=problem.d_out, fp8=problem.scales | {"descale_o": 3.0}
            )
        self.assertEqual(refusal.exception.field, "fp8.descale_o")
        with self.assertRaises(attnd.InvalidArgumentError) as refusal:
            self.client.backward_of(
                result.context, d_out=problem.d_out, fp8=problem.scales | {"scale_o": 1.0}
            )
        self.assertEqual(refusal.exception.field, "fp8.scale_o")

    def test_capabilities_name_the_types(self):
        (cpu,) = (b for b in self.client.capabilities().backends if b.name == "cpu")
        self.assertLessEqual({"FLOAT8_E4M3", "FLOAT8_E5M2"}, set(cpu.dtypes))


if __name__ == "__main__":
    unittest.main()
