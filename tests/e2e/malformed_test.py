"""What is wrong with a request is said by code, sentence and details: malformed_test.py.

Every case of malformed_cases is sent as Forward, every one of malformed_backward_cases as Backward,
and both, where it can see the mistake, as Plan; after each the server must still answer a good
request rightly.
"""

import pathlib
import sys
import unittest

import grpc

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import malformed_backward_cases
import malformed_cases
import sample_requests
from server_process import ServerProcess

from attnd import errors
from attnd.v1 import attention_pb2, attention_pb2_grpc, types_pb2

SECONDS = 60
LONGEST_SENTENCE = 1100
CASES = [case for cases in malformed_cases.ALL.values() for case in cases]
BACKWARD_CASES = [case for cases in malformed_backward_cases.ALL.values() for case in cases]


class MalformedTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = cls.enterClassContext(ServerProcess())
        cls.channel = cls.enterClassContext(sample_requests.open_channel(cls.server.address))
        cls.attention = attention_pb2_grpc.AttentionStub(cls.channel)
        cls.known = sample_requests.KnownRequest()

    def refusal(self, method, request):
        """The typed error that the call ends with."""
        with self.assertRaises(grpc.RpcError) as caught:
            method(request, timeout=SECONDS)
        return errors.from_rpc_error(caught.exception)

    def check_refusal(self, error, code, field):
        """errors.from_rpc_error takes field and reason from the details of domain attnd."""
        self.assertEqual((error.code, error.field), (code, field), error.message)
        self.assertIn(field, error.message)
        self.assertLess(len(error.message), LONGEST_SENTENCE)
        self.assertNotEqual(error.reason, "")
        self.assertIsNone(error.retry_after)

    def check_server(self):
        self.known.check(self.attention.Forward(self.known.request, timeout=SECONDS))
        self.known.check_backward(self.attention.Backward(self.known.backward, timeout=SECONDS))

    def test_every_sample_is_valid_and_planned(self):
        samples = [sample_requests.sample(layout) for layout in sample_requests.LAYOUTS]
        for request in samples + sample_requests.featured_samples():
            layout = types_pb2.QkvLayout.Name(request.spec.layout)
            with self.subTest(layout=layout):
                self.attention.Forward(request, timeout=SECONDS)
                self.check_planned(request)
                if "PAGED" in layout:
                    continue
                backward = sample_requests.answered_backward_of(request, self.attention)
                self.attention.Backward(backward, timeout=SECONDS)
                self.check_planned(backward)

    def check_planned(self, request):
        plan = self.attention.Plan(sample_requests.plan_of(request), timeout=SECONDS)
        self.assertTrue(plan.supported, plan.reason)

    def test_forward_names_the_field(self):
        self.check_cases(self.attention.Forward, CASES)

    def test_backward_names_the_field(self):
        self.check_cases(self.attention.Backward, BACKWARD_CASES)

    def check_cases(self, method, cases):
        for case in cases:
            with self.subTest(what=case.what, layout=case.layout, field=case.field):
                error = self.refusal(method, case.request())
                self.check_refusal(error, case.code, case.field)
                self.check_server()

    def test_plan_says_the_same(self):
        for case in CASES + BACKWARD_CASES:
            if not case.in_plan:
                continue
            with self.subTest(what=case.what, layout=case.layout, field=case.field):
                plan = sample_requests.plan_of(case.request())
                if case.code == grpc.StatusCode.UNIMPLEMENTED:
                    answer = self.attention.Plan(plan, timeout=SECONDS)
                    self.assertFalse(answer.supported)
                    self.assertIn(case.field, answer.reason)
                else:
                    self.check_refusal(
                        self.refusal(self.attention.Plan, plan), case.code, case.field
                    )
                self.check_server()

    def test_plan_takes_no_tensors(self):
        request = sample_requests.sample("BS3HD")
        plan = attention_pb2.PlanRequest(spec=request.spec, inputs=request.inputs)
        error = self.refusal(self.attention.Plan, plan)
        self.check_refusal(error, grpc.StatusCode.INVALID_ARGUMENT, "inputs.qkv.data")

    def test_plan_of_backward_returns_no_lse(self):
        plan = sample_requests.plan_of(sample_requests.sample("BS3HD"))
        plan.backward = plan.return_lse = True
        error = self.refusal(self.attention.Plan, plan)
        self.check_refusal(error, grpc.StatusCode.INVALID_ARGUMENT, "return_lse")

    def test_bytes_that_are_no_message(self):
        request = sample_requests.sample("STRIDED")
        valid = request.SerializeToString()
        no_messages = {
            "a field number of 0": b"\x00\x01",
            "ones": b"\xff" * 20,
            "an end without a group": b"\x0c",
            "a group without an end": b"\x0b",
            "a length past the end": b"\x0a\xff\xff\xff\xff\x07",
            "text": b"not a message at all",
            "cut in the data": valid[:-1],
            "cut in the spec": valid[:9],
            "invalid UTF-8 in a string": valid.replace(b"qkv", b"\xff\xfe\xfd"),
        }
        methods = {
            "/attnd.v1.Attention/Forward": "attnd.v1.ForwardRequest",
            "/attnd.v1.Attention/Backward": "attnd.v1.BackwardRequest",
            "/attnd.v1.Attention/Plan": "attnd.v1.PlanRequest",
        }
        for method, message in methods.items():
            raw = self.channel.unary_unary(method)
            for what, data in no_messages.items():
                with self.subTest(what=what, method=method):
                    error = self.refusal(raw, data)
                    self.assertEqual(error.code, grpc.StatusCode.INVALID_ARGUMENT, error.message)
                    self.assertIn(message, error.message)
                    self.assertEqual(error.reason, "MALFORMED_MESSAGE")
                    self.check_server()
        for method in ("/attnd.v1.Admin/GetCapabilities", "/grpc.health.v1.Health/Check"):
            with self.subTest(method=method):
                error = self.refusal(self.channel.unary_unary(method), b"\xff" * 20)
                self.assertEqual(error.code, grpc.StatusCode.INVALID_ARGUMENT, error.message)

    def test_an_empty_message_lacks_its_spec(self):
        for error in (
            self.refusal(self.attention.Forward, attention_pb2.ForwardRequest()),
            self.refusal(self.attention.Backward, attention_pb2.BackwardRequest()),
        ):
            self.check_refusal(error, grpc.StatusCode.INVALID_ARGUMENT, "spec")


if __name__ == "__main__":
    planned = sum(case.in_plan for case in CASES + BACKWARD_CASES)
    print(
        f"{len(CASES)} malformed requests, {len(BACKWARD_CASES)} for gradients, {planned} planned"
    )
    unittest.main()
