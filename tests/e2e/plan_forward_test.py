"""Plan says what Forward and Backward do, over random specs: plan_forward_test.py.

Requests of every layout with random sizes, masks and features, most of them with up to three random
changes to fields; ATTND_SPECS sets their number. Whatever Plan answers, the call must confirm.
"""

import collections
import os
import pathlib
import random
import sys
import unittest

import grpc

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import sample_requests
from server_process import ServerProcess

from attnd import errors
from attnd.v1 import attention_pb2_grpc, types_pb2

SPECS = int(os.environ.get("ATTND_SPECS", "500"))
SECONDS = 60
FLOAT32 = types_pb2.DATA_TYPE_FLOAT32
FP8 = (types_pb2.DATA_TYPE_FLOAT8_E4M3, types_pb2.DATA_TYPE_FLOAT8_E5M2)
SPEC_SIZES = (
    "batch max_seqlen_q max_seqlen_kv num_heads num_kv_heads head_dim_qk head_dim_v page_size"
).split()
# No tensor of these dimensions is too large to send but those that pass 2^63 bytes.
NUMBERS = (-1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 40, 2**62)
# Plan takes no page table's entries, so it cannot see that one lies outside a (changed) pool.
UNSEEN = ("sequences.page_table_k", "sequences.page_table_v")


class RandomRequests:
    """Random requests; the same seed makes the same ones."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def next(self):
        choose = self.random.choice
        if self.random.random() < 0.2:
            request = choose(sample_requests.featured_samples())
        else:
            request = sample_requests.sample(choose(sample_requests.LAYOUTS))
        spec = request.spec
        spec.deterministic = choose((False, False, True))
        spec.causal = choose((0, 0, 1, 2))
        if choose((False, True)):
            spec.window.left = choose((-1, 0, 1, 3))
            spec.window_alignment = choose((0, 1, 2))
        spec.scale = choose((0.0, 0.5, -1.0))
        request.return_lse = choose((False, True))
        if request.HasField("bias") and choose((False, True)):
            self._set_dtype(request, choose(FP8))  # The one thing that the CPU does not compute.
        elif self.random.random() < 0.2:
            self._set_dtype(request, choose(list(sample_requests.ELEMENT_BYTES)))
        for _ in range(choose((0, 0, 1, 1, 2, 3))):
            choose((self._size, self._axis, self._feature, self._sequences, self._buffer))(request)
        return request

    def _set_dtype(self, request, dtype):
        request.spec.dtype = dtype
        biases = [request.bias] if request.HasField("bias") else []
        for tensor in (*(tensor for _, tensor in request.inputs.ListFields()), *biases):
            tensor.CopyFrom(sample_requests.zeros(*tensor.shape, dtype=dtype))

    def _size(self, request):
        setattr(request.spec, self.random.choice(SPEC_SIZES), self.random.choice(NUMBERS))

    def _axis(self, request):
        _, tensor = self.random.choice(request.inputs.ListFields())
        shape = list(tensor.shape)
        change = self.random.random()
        if change < 0.2:
            shape.append(1)
        elif change < 0.4:
            self.random.shuffle(shape)
        elif shape:
            shape[self.random.randrange(len(shape))] = self.random.choice(NUMBERS)
        tensor.CopyFrom(sample_requests.zeros(*shape, dtype=tensor.dtype))

    def _feature(self, request):
        spec, choose = request.spec, self.random.choice
        match choose(range(9)):
            case 0:
                spec.bias_kind = choose((0, 1, 2, 3, 4))
            case 1:
                shape = (choose((1, 2)), choose((1, 4)), choose((1, 5)), choose((5, 7)))
                request.bias.CopyFrom(sample_requests.zeros(*shape))
            case 2:
                spec.softmax_kind = choose((0, 1, 2, 3))
            case 3:
                request.softmax_offset.CopyFrom(sample_requests.zeros(choose((3, 4))))
            case 4:
                spec.dropout.probability = choose((-1.0, 0.0, 0.5, 1.0))
            case 5:
                spec.logit_softcap = choose((0.0, 1.0, 50.0))
            case 6:
                spec.alibi.head_offset, spec.alibi.total_heads = choose((0, 4)), choose((2, 4, 8))
            case 7:
                spec.fp8.SetInParent()
            case 8:
                request.out_dtype = choose((0, 1, 2, 6, 7))

    def _sequences(self, request):
        name = self.random.choice(("q", "kv", "q_padded", "kv_padded"))
        array = getattr(request.sequences, f"cu_seqlens_{name}")
        change = self.random.random()
        if not array:
            array.extend(self.random.choice(((0, 2, 5), (0, 5, 10), (0, 7, 14))))
        elif change < 0.5:
            array[self.random.randrange(len(array))] = self.random.choice(NUMBERS)
        elif change < 0.8:
            del array[-1]
        else:
            del array[:]

    def _buffer(self, request):
        name = self.random.choice(("qkv", "q", "kv", "k", "v"))
        # One stays: without any, Plan makes the shapes from the spec, and Forward lacks them.
        if request.inputs.HasField(name) and len(request.inputs.ListFields()) > 1:
            request.inputs.ClearField(name)
        else:
            getattr(request.inputs, name).CopyFrom(sample_requests.zeros(2, 5, 4, 4))


def outcome(method, request):
    """(code, field, answer) of a call; answer is None where it fails."""
    try:
        return grpc.StatusCode.OK, "", method(request, timeout=SECONDS)
    except grpc.RpcError as error:
        refusal = errors.from_rpc_error(error)
        return refusal.code, refusal.field, None


class PlanForwardTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        server = cls.enterClassContext(ServerProcess())
        channel = cls.enterClassContext(sample_requests.open_channel(server.address))
        cls.attention = attention_pb2_grpc.AttentionStub(channel)

    def test_forward_does_what_plan_says(self):
        self.check(self.attention.Forward, RandomRequests(seed=31).next)

    def test_backward_does_what_plan_says(self):
        requests = RandomRequests(seed=32)

        def next_request():
            request = requests.next()
            # O's dtype, which Plan is not asked about.
            request.out_dtype = request.out_dtype if request.out_dtype == FLOAT32 else 0
            return sample_requests.answered_backward_of(request, self.attention)

        self.check(self.attention.Backward, next_request)

    def check(self, method, next_request):
        answers = collections.Counter()
        for i in range(SPECS):
            request = next_request()
            plan = sample_requests.plan_of(request)
            planned, plan_field, answer = outcome(self.attention.Plan, plan)
            code, field, _ = outcome(method, request)
            layout = types_pb2.QkvLayout.Name(request.spec.layout)
            with self.subTest(number=i, layout=layout, plan=planned, call=code):
                if answer is None:
                    self.assertEqual((code, field), (planned, plan_field))
                elif answer.supported and field not in UNSEEN:
                    self.assertEqual(code, grpc.StatusCode.OK)
                elif answer.supported:
                    self.assertEqual(code, grpc.StatusCode.INVALID_ARGUMENT)
                else:
                    self.assertEqual(code, grpc.StatusCode.UNIMPLEMENTED)
                    self.assertIn(field, answer.reason)
            answers[code.name] += 1
        print(", ".join(f"{number} {name}" for name, number in sorted(answers.items())))
        for code in ("OK", "INVALID_ARGUMENT", "UNIMPLEMENTED"):
            self.assertGreater(answers[code], SPECS // 100, code)


if __name__ == "__main__":
    unittest.main()
