"""attnctl against a real server. ATTND_SERVER and ATTNCTL name the programs."""

import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "e2e"))

from server_process import ServerProcess  # noqa: E402

_SECONDS = 60
_SIZES = ["--batch=2", "--seqlen-q=33", "--heads=4", "--head-dim=16"]
_RANDOM = ["forward", "--layout=BS3HD", "--random", *_SIZES]
_FEATURES = (
    ["--bias-kind=pre-scale"],
    ["--bias-kind=post-scale", "--bias-shape=111s", "--softcap=5"],
    ["--bias-kind=pre-scale", "--bias-shape=bhss", "--softmax=off-by-one"],
    ["--bias-kind=alibi", "--window-alignment=bottom-right"],
    ["--softmax=learnable", "--causal=bottom-right"],
    ["--dropout=0.3", "--dropout-seed=-5", "--dropout-offset=7"],
)


def attnctl(address, *arguments, timeout=_SECONDS):
    command = [os.environ["ATTNCTL"], f"--address={address}", *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def attention(q, k, v):
    """q, k, v: [b, s, h, d] -> out [b, s, h, d], lse [b, h, s], in float64."""
    logits = np.einsum("bihd,bjhd->bhij", q, k, dtype=np.float64) / math.sqrt(q.shape[-1])
    lse = np.log(np.exp(logits).sum(-1))
    return np.einsum("bhij,bjhd->bihd", np.exp(logits - lse[..., None]), v), lse


class AttnctlTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.socket = f"unix:{cls.folder}/attnd.sock"
        cls.server = cls.enterClassContext(ServerProcess(listen=("127.0.0.1:0", cls.socket)))

    def run_ok(self, *arguments):
        done = attnctl(self.server.address, *arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stderr, "")
        return done.stdout

    def run_error(self, exit_code, *arguments):
        done = attnctl(self.server.address, *arguments)
        self.assertEqual(done.returncode, exit_code, done.stdout + done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        self.assertTrue(done.stderr.startswith("attnctl: "), done.stderr)
        return done.stderr

    def path(self, name, array=None):
        path = self.folder / name
        if array is not None:
            np.save(path, array)
        return str(path)

    def test_health_is_serving_on_every_address(self):
        for address in self.server.addresses:
            done = attnctl(address, "health")
            self.assertEqual((done.returncode, done.stdout), (0, "SERVING\n"), done.stderr)
        self.assertEqual(json.loads(self.run_ok("health", "--json"))["status"], "SERVING")
        self.run_ok("health", "--wait=10")

    def test_health_of_nobody_is_one(self):
        done = attnctl("127.0.0.1:1", "health", "--wait=0.3")
        self.assertEqual(done.returncode, 1)
        self.assertIn("attnctl: UNAVAILABLE: ", done.stderr)
        self.assertIn("NOT_FOUND", self.run_error(1, "health", "--service=nonsense"))

    def test_capabilities(self):
        text = self.run_ok("capabilities")
        for part in ("attnd ", "backend cpu", "BFLOAT16", "BS3HD", "PAGED_KV_THD_SBHD_SBHD"):
            self.assertIn(part, text)
        reply = json.loads(self.run_ok("capabilities", "--json"))
        self.assertEqual(reply["lse_base"], "e")
        self.assertEqual(int(reply["limits"]["values_elements"]), 4096)

    def test_plan_prints_the_views(self):
        text = self.run_ok("plan", "--layout=BS3HD", *_SIZES)
        rows = {line.split()[0]: line.split()[1:] for line in text.splitlines()[1:5]}
        row = 3 * 4 * 16
        strides = [str(33 * row), str(row), "16", "1"]
        self.assertEqual(rows["q"], ["qkv", "0", *strides])
        self.assertEqual(rows["k"], ["qkv", str(4 * 16 * 4), *strides])
        self.assertEqual(rows["v"], ["qkv", str(4 * 16 * 8), *strides])
        self.assertEqual(rows["out"], ["out", "0", str(33 * 64), "64", "16", "1"])
        self.assertIn("supported by cpu", text)
        reply = json.loads(self.run_ok("plan", "--layout=BS3HD", *_SIZES, "--json"))
        self.assertTrue(reply["supported"])
        self.assertGreater(int(reply["device_bytes"]), 0)

    def test_plan_takes_shapes(self):
        text = self.run_ok("plan", "--layout=T3HD", "--shape=qkv:9,3,2,8", "--cu-seqlens-q=0,3,7",
                           "--cu-seqlens-kv=0,3,7")
        self.assertIn("supported by cpu", text)

    def test_forward_random_is_checked_in_every_type(self):
        for dtype in ("float32", "float16", "bfloat16", "float8_e4m3", "float8_e5m2"):
            text = self.run_ok(*_RANDOM, f"--dtype={dtype}", "--causal=top-left", "--check")
            self.assertIn("sent BS3HD", text)
            self.assertIn("check PASS: relative RMS error of O", text)
            self.assertIn("max abs error of LSE", text)
            self.assertIn("ran on cpu", text)

    def test_fp8_scales(self):
        scaled = ["--dtype=float8_e4m3", "--fp8-scale=scale_o=32", "--fp8-scale=descale_v=0.5"]
        self.assertIn("check PASS", self.run_ok(*_RANDOM, *scaled, "--check"))
        amax = json.loads(self.run_ok(*_RANDOM, *scaled, "--json"))["reply"]["amax"]
        self.assertEqual(amax.keys(), {"s", "o"})
        out = ["--fp8-scale=descale_o=0.03125", "--fp8-scale=scale_d_q=16"]
        self.assertIn("check PASS",
                      self.run_ok("backward", *_RANDOM[1:], *scaled, *out, "--check"))

    def test_forward_random_runs_every_kind_of_layout(self):
        thd = ["--cu-seqlens-q=0,3,3,9", "--cu-seqlens-kv=0,5,6,10"]
        heads = ["--heads=4", "--kv-heads=2", "--head-dim=16", "--head-dim-v=16"]
        dense = ["--batch=3", "--seqlen-q=7", "--seqlen-kv=9", *heads]
        for arguments in (
            ["--layout=SBHD_SBH2D", *dense, "--window=2,1", "--window-alignment=bottom-right"],
            ["--layout=BHSD_BHSD_BHSD", *dense, "--softcap=20", "--scale=-0.5"],
            ["--layout=BSHD_SBHD_SBHD", *dense, "--cu-seqlens-q=0,3,3,9",
             "--cu-seqlens-kv=0,5,6,10"],
            ["--layout=THD_T2HD", *heads, *thd, "--cu-seqlens-q-padded=1,5,6,14"],
            ["--layout=PAGED_KV_THD_SBHD_SBHD", *heads, *thd, "--page-size=2"],
            ["--layout=STRIDED", *dense, "--shape=qkv:27,8,16", "--view=q:qkv:0:1152,128,16,1",
             "--view=k:qkv:256:1152,128,16,1", "--view=v:qkv:384:1152,128,16,1"],
        ):
            with self.subTest(layout=arguments[0]):
                text = self.run_ok("forward", "--random", "--check", *arguments)
                self.assertIn("check PASS", text)

    def test_features_are_checked_in_both_passes(self):
        sizes = ["--layout=BSHD_BS2HD", "--batch=2", "--seqlen-q=9", "--seqlen-kv=13", "--heads=4",
                 "--kv-heads=2", "--head-dim=16"]
        for features in _FEATURES:
            for command in ("forward", "backward"):
                with self.subTest(command=command, features=features):
                    text = self.run_ok(command, *sizes, *features, "--random", "--check")
                    self.assertIn("check PASS", text)
            plan = self.run_ok("plan", *sizes, *features, "--backward")
            self.assertIn("supported by cpu", plan)

    def test_backward_random_is_checked_in_every_type(self):
        for dtype in ("float32", "float16", "bfloat16", "float8_e4m3", "float8_e5m2"):
            text = self.run_ok("backward", *_RANDOM[1:], f"--dtype={dtype}", "--causal=top-left",
                               "--check")
            self.assertIn("sent BS3HD", text)
            self.assertIn("d_out", text)
            self.assertIn("check PASS: RMS error of d_qkv", text)
        document = json.loads(self.run_ok("backward", *_RANDOM[1:], "--check", "--json"))
        self.assertTrue(document["check"]["passed"])
        self.assertLess(document["check"]["rms_errors"]["d_qkv"], document["check"]["bound"])
        shape = [int(n) for n in document["reply"]["grads"]["qkv"]["shape"]]
        self.assertEqual(shape, [2, 33, 3, 4, 16])
        self.assertEqual(document["received_bytes"], 2 * 33 * 3 * 4 * 16 * 4)

    def test_backward_runs_every_kind_of_layout(self):
        heads = ["--heads=4", "--kv-heads=2", "--head-dim=16", "--head-dim-v=16"]
        thd = ["--cu-seqlens-q=0,3,3,9", "--cu-seqlens-kv=0,5,6,10"]
        dense = ["--batch=3", "--seqlen-q=7", "--seqlen-kv=9", *heads]
        for arguments in (
            ["--layout=SBHD_SBH2D", *dense, "--window=2,1", "--window-alignment=bottom-right"],
            ["--layout=BSHD_SBHD_SBHD", *dense, *thd],
            ["--layout=THD_T2HD", *heads, *thd, "--cu-seqlens-q-padded=1,5,6,14"],
            ["--layout=STRIDED", *dense, "--shape=qkv:27,8,16", "--view=q:qkv:0:1152,128,16,1",
             "--view=k:qkv:256:1152,128,16,1", "--view=v:qkv:384:1152,128,16,1"],
        ):
            with self.subTest(layout=arguments[0]):
                text = self.run_ok("backward", "--random", "--check", *arguments)
                self.assertIn("check PASS", text)
        error = self.run_error(1, "backward", "--layout=PAGED_KV_THD_SBHD_SBHD", *heads, *thd,
                               "--page-size=2", "--random")
        self.assertIn("(field spec.layout, reason ", error)

    def test_backward_of_files_matches_numpy(self):
        random = np.random.default_rng(4)
        q, k, v, d_out = (random.standard_normal((2, 5, 3, 8), np.float32) for _ in range(4))
        files = ["--layout=BSHD_BSHD_BSHD", "--q", self.path("gq.npy", q),
                 "--k", self.path("gk.npy", k), "--v", self.path("gv.npy", v)]
        logits = np.einsum("bihd,bjhd->bhij", q, k, dtype=np.float64) / math.sqrt(8)
        weights = np.exp(logits)
        weights /= weights.sum(-1, keepdims=True)
        d_weights = np.einsum("bihd,bjhd->bhij", d_out, v, dtype=np.float64)
        d_logits = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True))
        expected = {
            "q": np.einsum("bhij,bjhd->bihd", d_logits, k) / math.sqrt(8),
            "k": np.einsum("bhij,bihd->bjhd", d_logits, q) / math.sqrt(8),
            "v": np.einsum("bhij,bihd->bjhd", weights, d_out),
        }
        self.run_ok("forward", *files, "--out", self.path("go.npy"), "--lse-out",
                    self.path("gl.npy"))
        saved = ["--out", self.path("go.npy"), "--lse", self.path("gl.npy")]
        for results in ([], saved):
            self.run_ok("backward", *files, *results, "--d-out", self.path("gd.npy", d_out),
                        "--grads-out", self.path("grad"), "--check")
            for name, gradient in expected.items():
                file = self.folder / f"grad.{name}.npy"
                np.testing.assert_allclose(np.load(file), gradient, rtol=1e-4, atol=1e-5)
                file.unlink()
        self.run_error(2, "backward", *files)
        self.run_error(2, "backward", *files, "--random")
        self.run_error(2, "backward", *files, *saved[:2], "--d-out", self.path("gd.npy"))
        error = self.run_error(1, "backward", *files, *saved, "--d-out", self.path("gl.npy"))
        self.assertIn("field d_out", error)

    def test_backward_of_a_retained_forward(self):
        arguments = ["backward", *_RANDOM[1:], "--causal=top-left", "--check"]
        text = self.run_ok(*arguments, "--retain=60")
        self.assertRegex(text, r"sent for context \S+\n")
        self.assertNotIn("lse", text)
        self.assertIn("check PASS: RMS error of d_qkv", text)
        document = json.loads(self.run_ok(*arguments, "--retain=60", "--json"))
        self.assertEqual(document["sent_bytes"], 2 * 33 * 4 * 16 * 4)

    def test_bias_and_sinks_come_from_files(self):
        x = np.random.default_rng(5).standard_normal((1, 4, 2, 8), np.float32)
        bias = np.random.default_rng(6).standard_normal((1, 1, 4, 4), np.float32)
        sink = np.array([0.5, -1], np.float32)
        self.run_ok(
            "backward", "--layout=BSHD_BSHD_BSHD", "--q", self.path("x.npy", x),
            "--k", self.path("x.npy"), "--v", self.path("x.npy"), "--d-out", self.path("x.npy"),
            "--bias-kind=post-scale", "--bias", self.path("bias.npy", bias), "--softmax=learnable",
            "--softmax-offset", self.path("sink.npy", sink), "--grads-out", self.path("featured"),
            "--check",
        )
        d_bias = np.load(self.path("featured.bias.npy"))
        d_sink = np.load(self.path("featured.softmax_offset.npy"))
        self.assertEqual((d_bias.shape, d_sink.shape), ((1, 1, 4, 4), (2,)))
        # A constant added to all logits, the sink's too, changes nothing.
        self.assertAlmostEqual(float(d_bias.sum() + d_sink.sum()), 0, places=5)
        self.assertIn("bias", self.run_error(
            2, "forward", "--layout=BS3HD", "--qkv", self.path("x3.npy", np.stack([x] * 3, 2)),
            "--bias-kind=pre-scale",
        ))

    def test_it_ends_when_it_has_its_answer(self):
        # gRPC's own shutdown took 10 s after some of the calls that send much.
        sizes = ["--batch=2", "--seqlen-q=200", "--heads=4", "--head-dim=64"]
        for _ in range(10):
            done = attnctl(
                self.socket, "forward", "--layout=BS3HD", "--random", *sizes, timeout=9
            )
            self.assertEqual(done.returncode, 0, done.stderr)

    def test_forward_json(self):
        document = json.loads(self.run_ok(*_RANDOM, "--check", "--json"))
        self.assertTrue(document["check"]["passed"])
        self.assertLess(document["check"]["out_relative_rms_error"], document["check"]["out_bound"])
        self.assertEqual([int(n) for n in document["reply"]["out"]["shape"]], [2, 33, 4, 16])
        self.assertNotIn("data", document["reply"]["out"])
        self.assertEqual(document["sent_bytes"], 2 * 33 * 3 * 4 * 16 * 4)

    def test_forward_of_files_matches_numpy(self):
        random = np.random.default_rng(0)
        q, k, v = (random.standard_normal((2, 5, 3, 8), np.float32) for _ in range(3))
        out, lse = attention(q, k, v)
        self.run_ok(
            "forward", "--layout=BSHD_BSHD_BSHD", "--q", self.path("q.npy", q),
            "--k", self.path("k.npy", k), "--v", self.path("v.npy", v),
            "--out", self.path("out.npy"), "--lse-out", self.path("lse.npy"),
        )
        np.testing.assert_allclose(np.load(self.path("out.npy")), out, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(np.load(self.path("lse.npy")), lse, rtol=1e-5)
        kv = np.stack([k, v], axis=2)
        self.run_ok(
            "forward", "--layout=BSHD_BS2HD", "--q", self.path("q.npy"),
            "--kv", self.path("kv.npy", kv), "--out", self.path("packed.npy"), "--check",
        )
        np.testing.assert_allclose(np.load(self.path("packed.npy")), out, rtol=1e-4, atol=1e-5)

    def test_bfloat16_files_are_bits(self):
        values = np.linspace(-2, 2, 2 * 3 * 1 * 4, dtype=np.float32).reshape(1, 2, 3, 1, 4)
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        for name, array in (("u2.npy", bits), ("v2.npy", bits.view("V2"))):
            self.run_ok("forward", "--layout=BS3HD", "--dtype=bfloat16", "--qkv",
                        self.path(name, array), "--out", self.path("b.npy"), "--check")
            self.assertEqual(np.load(self.path("b.npy")).dtype, np.uint16)
            self.assertEqual(np.load(self.path("b.npy")).shape, (1, 2, 1, 4))
        self.assertIn("--dtype bfloat16",
                      self.run_error(2, "forward", "--layout=BS3HD", "--qkv", self.path("u2.npy")))

    def test_page_tables_come_from_files(self):
        pool = np.random.default_rng(1).standard_normal((4, 2, 1, 8), np.float32)
        q = np.ones((3, 1, 8), np.float32)
        arguments = [
            "forward", "--layout=PAGED_KV_THD_BSHD_BSHD", "--q", self.path("pq.npy", q),
            "--k", self.path("pk.npy", pool), "--v", self.path("pv.npy", pool),
            "--cu-seqlens-q=0,1,3", "--cu-seqlens-kv=0,3,5", "--check",
        ]
        good = self.path("good.npy", np.array([[3, 1], [0, 2]], np.int32))
        bad = self.path("bad.npy", np.array([[3, 4], [0, 2]], np.int32))
        text = self.run_ok(*arguments, "--page-table-k", good, "--page-table-v", good)
        self.assertIn("check PASS", text)
        error = self.run_error(1, *arguments, "--page-table-k", bad, "--page-table-v", good)
        self.assertIn("sequences.page_table_k", error)

    def test_progress_is_drawn_and_erased(self):
        arguments = ["forward", "--layout=BS3HD", "--random", "--batch=1", "--seqlen-q=512",
                     "--heads=8", "--head-dim=64", "--progress"]
        for address in self.server.addresses:
            done = attnctl(address, *arguments)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertRegex(done.stderr, r"\[.*\] +\d+%  .*of 3\.0 MiB|3\.0 MiB sent, waiting")
            self.assertTrue(done.stderr.endswith("\x1b[K"))
            self.assertIn("ran on cpu", done.stdout)

    def test_refusals_are_one_line_with_field_and_reason(self):
        error = self.run_error(1, "plan", "--layout=BS3HD", *_SIZES, "--kv-heads=2")
        self.assertIn("INVALID_ARGUMENT: ", error)
        self.assertIn("(field spec.num_kv_heads, reason SHAPE_MISMATCH)", error)
        done = attnctl(self.server.address, "plan", "--layout=BS3HD", *_SIZES, "--kv-heads=2",
                       "--json")
        self.assertEqual(done.returncode, 1)
        self.assertEqual(json.loads(done.stdout)["error"]["field"], "spec.num_kv_heads")

    def test_usage_errors_are_two(self):
        self.run_error(2)
        self.run_error(2, "forward", *_SIZES)
        self.run_error(2, "forward", "--layout=BS3HD")
        self.run_error(2, "forward", "--layout=BS3HD", "--qkv=/nowhere.npy")
        self.run_error(2, *_RANDOM, "--kv-heads=2")
        for name in ("stats", "warm", "put", "get"):
            self.assertIn("not built yet", self.run_error(2, name))

    def test_unwritable_output_is_one(self):
        self.assertIn("/nowhere/o.npy", self.run_error(1, *_RANDOM, "--out=/nowhere/o.npy"))


if __name__ == "__main__":
    unittest.main()
