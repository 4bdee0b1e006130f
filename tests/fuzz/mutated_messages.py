"""Mutated Forward, Backward and Plan messages against a real server: mutated_messages.py.

100,000 messages (environment: ATTND_FUZZ_MESSAGES, ATTND_FUZZ_SEED) must each get an answer that a
peer can cause; the server must live, be right afterwards, and not grow after the first 10,000.
"""

import asyncio
import collections
import itertools
import os
import pathlib
import sys
import time
import unittest

import grpc

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
import malformed_backward_cases
import malformed_cases
import sample_requests
from mutations import Mutator
from server_process import ServerProcess

from attnd.v1 import attention_pb2, attention_pb2_grpc, types_pb2

MESSAGES = int(os.environ.get("ATTND_FUZZ_MESSAGES", "100000"))
SEED = int(os.environ.get("ATTND_FUZZ_SEED", "20240229"))
WARM_UP = 10_000  # Messages after which the server's memory must not grow...
MOST_GROWTH = 0.05  # ... by more than this.
STEPS = 9  # After the warm-up. An allocator's size wavers: three are compared with three.
CHANNELS = 4
IN_FLIGHT = 64
SETTLING = 400
MOST_BYTES = 1 << 16  # Of a message before it is mutated.
ANSWER_SECONDS = 120
ANSWERS = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.NOT_FOUND,  # Of contexts.
    grpc.StatusCode.FAILED_PRECONDITION,  # Of contexts that were.
}
METHODS = {
    attention_pb2.ForwardRequest: "/attnd.v1.Attention/Forward",
    attention_pb2.BackwardRequest: "/attnd.v1.Attention/Backward",
    attention_pb2.PlanRequest: "/attnd.v1.Attention/Plan",
}
# Small, so that mutants with large outputs are refused as well as answered.
POOL = "--pinned-pool=8MiB"


def make_corpus(attention):
    """Every sample, some with masks, lengths, placements and values; the same for gradients; and the
    plans of all.

    attention: stub of a server that answers the samples.
    """
    forwards = []
    for i, layout in enumerate(sample_requests.LAYOUTS):
        request = sample_requests.sample(layout)
        forwards.append(request)
        varied = attention_pb2.ForwardRequest()
        varied.CopyFrom(request)
        varied.return_lse = True
        varied.spec.causal = i % 3
        varied.spec.window.left = i % 4
        varied.spec.window_alignment = varied.spec.causal or 1 + i % 2
        varied.spec.scale = 0.5
        if i % 2:
            varied.spec.logit_softcap = 30
            varied.out_placement.values.SetInParent()
            varied.lse_placement.values.SetInParent()
        forwards.append(varied)
    by_hand = sample_requests.sample("BS3HD")
    by_hand.inputs.qkv.CopyFrom(
        types_pb2.Tensor(
            dtype=types_pb2.DATA_TYPE_BFLOAT16, shape=[1, 2, 3, 1, 1], values=[1, 2, 3, 4, 5, 6]
        )
    )
    by_hand.spec.dtype = types_pb2.DATA_TYPE_BFLOAT16
    by_hand.sequences.cu_seqlens_q.extend((0, 1))
    by_hand.sequences.cu_seqlens_kv.extend((0, 1))
    forwards.append(by_hand)
    forwards.extend(sample_requests.featured_samples())
    backwards = [sample_requests.answered_backward_of(request, attention) for request in forwards]
    for request in backwards[::3]:
        request.grads_placement.values.SetInParent()
    forwards.extend(small_requests(malformed_cases.NOT_BUILT))
    for cases in (malformed_backward_cases.NOT_BUILT, malformed_backward_cases.CONTEXTS):
        backwards.extend(small_requests(cases))
    requests = forwards + backwards
    return requests + [sample_requests.plan_of(request) for request in requests]


def small_requests(cases):
    requests = (case.request() for case in cases)
    return [request for request in requests if request.ByteSize() < MOST_BYTES]


def resident_kib(pid):
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1])


class Fuzzer:
    """Sends mutants over several channels, many at once, and counts the answers.

    Attributes:
      answers: {(method, code): number}.
      wrong: (method, message, code, details) of answers that no peer should cause; at most 5.
    """

    def __init__(self, address, seed):
        self._address = address
        with sample_requests.open_channel(address) as channel:
            corpus = make_corpus(attention_pb2_grpc.AttentionStub(channel))
        self._methods = [METHODS[type(message)] for message in corpus]
        self._mutator = Mutator(corpus, seed)
        self.answers = collections.Counter()
        self.wrong = []

    def send(self, count):
        asyncio.run(self._send(count))

    async def _send(self, count):
        numbers = iter(range(count))
        options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        channels = [grpc.aio.insecure_channel(self._address, options) for _ in range(CHANNELS)]
        calls = [
            {method: channel.unary_unary(method) for method in METHODS.values()}
            for channel in channels
        ]
        try:
            lanes = itertools.islice(itertools.cycle(calls), IN_FLIGHT)
            await asyncio.gather(*(self._lane(call, numbers) for call in lanes))
        finally:
            for channel in channels:
                await channel.close()

    async def _lane(self, calls, numbers):
        for _ in numbers:
            index, message = self._mutator.next()
            method = self._methods[index]
            call = calls[method](message, timeout=ANSWER_SECONDS)
            code = await call.code()
            self.answers[method, code] += 1
            if code not in ANSWERS and len(self.wrong) < 5:
                self.wrong.append((method, message.hex(), code, await call.details()))


class MutatedMessagesTest(unittest.TestCase):
    def test_mutants_are_answered_and_the_server_neither_dies_nor_grows(self):
        start = time.monotonic()
        warm_up = min(WARM_UP, MESSAGES)
        with ServerProcess(arguments=[POOL]) as server:
            fuzzer = Fuzzer(server.address, SEED)
            fuzzer.send(warm_up)
            sizes = [self.settled_kib(server)]
            for step in range(STEPS):
                rest = MESSAGES - warm_up
                fuzzer.send(rest * (step + 1) // STEPS - rest * step // STEPS)
                sizes.append(self.settled_kib(server))
            for (method, code), number in sorted(
                fuzzer.answers.items(), key=lambda item: (item[0][0], item[0][1].name)
            ):
                print(f"{method} {code.name}: {number}")
            print(f"resident KiB after {warm_up} to {MESSAGES} messages: {sizes}")
            print(f"{time.monotonic() - start:.1f} s, seed {SEED}")
            self.check_answers(fuzzer)
        self.assertLess(min(sizes[-3:]), max(sizes[:3]) * (1 + MOST_GROWTH))

    def settled_kib(self, server):
        """Resident KiB once the pool keeps what these requests need, and not the mutants before.

        The answers are checked on the way.
        """
        known = sample_requests.KnownRequest()
        with sample_requests.open_channel(server.address) as channel:
            attention = attention_pb2_grpc.AttentionStub(channel)
            for _ in range(SETTLING):
                known.check(attention.Forward(known.request, timeout=ANSWER_SECONDS))
                known.check_backward(attention.Backward(known.backward, timeout=ANSWER_SECONDS))
        return resident_kib(server.pid)

    def check_answers(self, fuzzer):
        self.assertEqual(fuzzer.wrong, [])
        self.assertEqual(fuzzer.answers.total(), MESSAGES)
        # The mutants reach every depth: nonsense, contradictions, and requests that run.
        for method in METHODS.values():
            total = sum(n for (name, _), n in fuzzer.answers.items() if name == method)
            self.assertGreater(total, MESSAGES // 10)
            self.assertGreater(fuzzer.answers[method, grpc.StatusCode.OK], total // 30)
            invalid = fuzzer.answers[method, grpc.StatusCode.INVALID_ARGUMENT]
            self.assertGreater(invalid, total // 3)


if __name__ == "__main__":
    unittest.main()
