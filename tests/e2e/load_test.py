"""A busy, full or cancelled server, and messages of 300 MB: load_test.py."""

import pathlib
import sys
import time
import unittest

import grpc
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import attention_oracle
import sample_requests
from long_request import LongRequest, cpu_seconds, wait_until_computing
from server_process import ServerProcess

from attnd import errors
from attnd.v1 import attention_pb2, attention_pb2_grpc, types_pb2

SECONDS = 240
RETRIES = 600
RETRY_SECONDS = 0.1
MIB = 1 << 20


def tokens(count, dim=64):
    """T3HD with one head: the first 8 of `count` tokens are a sequence, the rest is padding."""
    request = attention_pb2.ForwardRequest()
    request.spec.layout = types_pb2.QKV_LAYOUT_T3HD
    request.spec.dtype = types_pb2.DATA_TYPE_FLOAT32
    request.sequences.cu_seqlens_q.extend((0, 8))
    request.sequences.cu_seqlens_kv.extend((0, 8))
    qkv = np.zeros((count, 3, 1, dim), dtype="<f4")
    qkv[:8] = np.random.default_rng(count).standard_normal((8, 3, 1, dim))
    request.inputs.qkv.dtype = types_pb2.DATA_TYPE_FLOAT32
    request.inputs.qkv.shape.extend(qkv.shape)
    request.inputs.qkv.data = qkv.tobytes()
    return request


def check_tokens(request, response):
    """AssertionError unless the response answers tokens(...)."""
    shape = tuple(request.inputs.qkv.shape)
    used = np.frombuffer(request.inputs.qkv.data, dtype="<f4", count=8 * 3 * shape[-1])
    q, k, v = used.astype("f8").reshape(8, 3, -1).swapaxes(0, 1)
    weights = np.exp(q @ k.T / shape[-1] ** 0.5)
    expected = weights @ v / weights.sum(axis=1, keepdims=True)
    out = np.frombuffer(response.out.data, dtype="<f4").reshape(shape[0], shape[-1])
    np.testing.assert_allclose(out[:8], expected, atol=1e-5)
    assert not out[8:].any(), "padding rows are not 0"


class LoadTest(unittest.TestCase):
    long = LongRequest()

    def start(self, *arguments):
        """A server with one thread; self.attention is its stub."""
        self.server = self.enterContext(ServerProcess(arguments=["--threads=1", *arguments]))
        channel = self.enterContext(sample_requests.open_channel(self.server.address))
        self.attention = attention_pb2_grpc.AttentionStub(channel)

    def keep_busy(self):
        """Starts the long request and returns its future once the worker computes it."""
        before = cpu_seconds(self.server.pid)
        future = self.attention.Forward.future(self.long.request, timeout=SECONDS)
        wait_until_computing(self.server.pid, before)
        return future

    def refusal(self, request):
        with self.assertRaises(grpc.RpcError) as caught:
            self.attention.Forward(request, timeout=SECONDS)
        return errors.from_rpc_error(caught.exception)

    def check_server(self):
        known = sample_requests.KnownRequest()
        known.check(self.attention.Forward(known.request, timeout=SECONDS))

    def wait_for_refusals(self, futures, count):
        """Waits until `count` of the futures are refused for the full queue; returns the rest."""
        for _ in range(RETRIES):
            if sum(future.done() for future in futures) >= count:
                break
            time.sleep(RETRY_SECONDS)
        refused = [future for future in futures if future.done()]
        self.assertGreaterEqual(len(refused), count)
        for future in refused:
            self.check_queue_full(future.exception())
        return [future for future in futures if future not in refused]

    def check_queue_full(self, rpc_error):
        error = errors.from_rpc_error(rpc_error)
        self.assertEqual(error.code, grpc.StatusCode.RESOURCE_EXHAUSTED, error.message)
        self.assertEqual(error.reason, "QUEUE_FULL")
        self.assertIn("--max-queue", error.message)
        self.assertGreater(error.retry_after, 0)

    def forward_with_retries(self, request):
        """The answer, asked for again while the queue is full."""
        for _ in range(RETRIES):
            try:
                return self.attention.Forward(request, timeout=SECONDS)
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
            time.sleep(RETRY_SECONDS)
        self.fail("the queue stays full")

    def test_a_deadline_passes_while_the_worker_is_busy(self):
        self.start("--max-queue=2MiB")
        busy = self.keep_busy()
        queued = [self.attention.Forward.future(tokens(512), timeout=0.3) for _ in range(3)]
        for future in queued:  # Queued until their deadline, or refused: two fit.
            self.assertIn(
                future.code(),
                (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED),
            )
        self.assertIn(grpc.StatusCode.DEADLINE_EXCEEDED, [future.code() for future in queued])
        # They make room at once, for a request that takes most of the queue.
        request = tokens(1600)
        check_tokens(request, self.forward_with_retries(request))
        self.long.check(busy.result())

    def test_cancelled_requests_leave_the_queue(self):
        self.start("--max-queue=2MiB")
        busy = self.keep_busy()
        # Two of 0.7 MiB fit with their workspace, three do not without.
        futures = [self.attention.Forward.future(tokens(700), timeout=SECONDS) for _ in range(5)]
        queued = self.wait_for_refusals(futures, 3)
        for future in queued:
            future.cancel()
        request = tokens(1600)
        check_tokens(request, self.forward_with_retries(request))
        self.long.check(busy.result())

    def test_a_full_queue_refuses_and_answers_the_rest_rightly(self):
        self.start("--max-queue=4MiB")
        busy = self.keep_busy()
        requests = [tokens(240 + i) for i in range(40)]
        futures = [self.attention.Forward.future(r, timeout=SECONDS) for r in requests]
        answered = 0
        for request, future in zip(requests, futures):
            if future.exception() is None:
                check_tokens(request, future.result())
                answered += 1
            else:
                self.check_queue_full(future.exception())
        self.assertGreater(answered, 0)
        self.assertLess(answered, len(futures))
        self.long.check(busy.result())
        self.check_server()
        print(f"{answered} of {len(futures)} requests answered, the rest refused")

    def test_a_request_that_the_pool_can_never_hold(self):
        self.start("--pinned-pool=8MiB")
        one_tensor = tokens(16_384)  # 12 MiB.
        in_sum = sample_requests.sample("BSHD_BSHD_BSHD")  # Four times 3 MiB.
        for name in ("q", "k", "v"):
            getattr(in_sum.inputs, name).CopyFrom(sample_requests.zeros(1, 384, 32, 64))
        for what, request in (("one tensor", one_tensor), ("all together", in_sum)):
            with self.subTest(what=what):
                error = self.refusal(request)
                self.assertEqual(error.code, grpc.StatusCode.RESOURCE_EXHAUSTED, error.message)
                self.assertEqual(error.reason, "POOL_EXHAUSTED")
                self.assertRegex(error.message, rf"--pinned-pool.*need \d+ .*have \d+ of {8 * MIB}")
                self.assertIsNone(error.retry_after, "a retry can never help")
                self.check_server()

    def test_a_pool_that_is_full_now(self):
        # The long request, its workspace, and less than the other one.
        self.start(f"--pinned-pool={self.long.mebibytes + 16}MiB")
        busy = self.keep_busy()
        request = tokens(24_000)  # 18 MiB and 6.
        error = self.refusal(request)
        self.assertEqual(error.code, grpc.StatusCode.RESOURCE_EXHAUSTED, error.message)
        self.assertGreater(error.retry_after, 0)
        self.long.check(busy.result())
        check_tokens(request, self.forward_with_retries(request))

    def test_both_passes_at_once(self):
        self.server = self.enterContext(ServerProcess())
        known = sample_requests.KnownRequest()
        stubs = [
            attention_pb2_grpc.AttentionStub(
                self.enterContext(sample_requests.open_channel(self.server.address))
            )
            for _ in range(4)
        ]
        calls = []
        for _ in range(50):
            for stub in stubs:
                forward = stub.Forward.future(known.request, timeout=SECONDS)
                backward = stub.Backward.future(known.backward, timeout=SECONDS)
                calls += [(forward, known.check), (backward, known.check_backward)]
        for future, check in calls:
            check(future.result())

    def test_messages_of_300_mb(self):
        self.start()
        request = tokens(400_000)  # 307 MB in, 102 MB out.
        self.assertGreater(len(request.inputs.qkv.data), 300_000_000)
        check_tokens(request, self.attention.Forward(request, timeout=SECONDS))
        # The same tokens with separate K and V: the reply is as large as Q.
        separate = attention_pb2.ForwardRequest()
        separate.spec.layout = types_pb2.QKV_LAYOUT_THD_THD_THD
        separate.spec.dtype = types_pb2.DATA_TYPE_FLOAT32
        separate.sequences.cu_seqlens_q.extend((0, 1))
        separate.sequences.cu_seqlens_kv.extend((0, 1))
        separate.inputs.q.CopyFrom(types_pb2.Tensor(dtype=1, shape=[1_200_000, 1, 64]))
        separate.inputs.q.data = bytes(4 * 64 * 1_200_000)
        for tensor in (separate.inputs.k, separate.inputs.v):
            tensor.CopyFrom(types_pb2.Tensor(dtype=1, shape=[1, 1, 64], values=range(64)))
        response = self.attention.Forward(separate, timeout=SECONDS)
        self.assertEqual(list(response.out.shape), [1_200_000, 1, 64])
        out = np.frombuffer(response.out.data, dtype="<f4").reshape(1_200_000, 64)
        np.testing.assert_allclose(out[0], np.arange(64))
        self.assertFalse(out[1:].any())
        self.check_server()

    def test_gradients_of_300_mb(self):
        self.start("--pinned-pool=2GiB")
        forward = tokens(400_000)
        request = sample_requests.backward_of(forward)  # 307 MB of QKV, 102 MB of O and of dO.
        d_out = np.zeros((400_000, 64), dtype="<f4")
        d_out[:8] = np.random.default_rng(1).standard_normal((8, 64))
        d_out[8:] = np.nan  # Of nobody.
        forward.return_lse = True
        answer = self.attention.Forward(forward, timeout=SECONDS)
        request.out.data, request.lse.data = answer.out.data, answer.lse.data
        request.d_out.data = d_out.tobytes()
        del answer
        qkv = np.frombuffer(forward.inputs.qkv.data, dtype="<f4", count=8 * 3 * 64)
        oracle = attention_oracle.Attention(*qkv.reshape(8, 3, 1, 64).swapaxes(0, 1))
        expected = oracle.backward(d_out[:8, None])
        response = self.attention.Backward(request, timeout=SECONDS)
        got = np.frombuffer(response.grads.qkv.data, dtype="<f4").reshape(-1, 3, 1, 64)
        self.assertEqual(len(got), 400_000)
        for slot, name in enumerate("qkv"):
            np.testing.assert_allclose(got[:8, slot], expected[name], atol=1e-5)
        self.assertFalse(got[8:].any())


if __name__ == "__main__":
    unittest.main()
