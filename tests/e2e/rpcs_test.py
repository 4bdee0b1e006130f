"""Every RPC of every service, as reflection lists them, answers; rpcs_test.py."""

import pathlib
import sys
import unittest

import grpc
from google.protobuf import descriptor_pool, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import sample_requests
from server_process import ServerProcess

from attnd import errors

SECONDS = 60
NAMES = (
    "attnd.v1.Attention",
    "attnd.v1.Tensors",
    "attnd.v1.Sessions",
    "attnd.v1.Admin",
    "inference.GRPCInferenceService",
)
STANDARD = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
BUILT = {
    "Attention.Forward",
    "Attention.Backward",
    "Attention.Plan",
    "Admin.GetCapabilities",
}


class RpcsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = cls.enterClassContext(ServerProcess())
        cls.channel = cls.enterClassContext(sample_requests.open_channel(cls.server.address))
        cls.reflection = ProtoReflectionDescriptorDatabase(cls.channel)
        cls.pool = descriptor_pool.DescriptorPool(cls.reflection)

    def methods(self):
        for name in NAMES:
            yield from self.pool.FindServiceByName(name).methods

    def refusal(self, method, request):
        """Calls the method, whatever its shape, and returns the typed error that it ends with."""
        kind = f"{'stream' if method.client_streaming else 'unary'}_" + (
            "stream" if method.server_streaming else "unary"
        )
        path = f"/{method.containing_service.full_name}/{method.name}"
        call = getattr(self.channel, kind)(path)
        with self.assertRaises(grpc.RpcError) as caught:
            answer = call(iter([request]) if method.client_streaming else request, timeout=SECONDS)
            if method.server_streaming:
                list(answer)
        return errors.from_rpc_error(caught.exception)

    def test_reflection_lists_the_services(self):
        self.assertEqual(set(self.reflection.get_services()), set(NAMES) | STANDARD)

    def test_what_is_not_built_says_so_by_name(self):
        seen = set()
        for method in self.methods():
            name = f"{method.containing_service.name}.{method.name}"
            seen.add(name)
            if name in BUILT:
                continue
            empty = message_factory.GetMessageClass(method.input_type)().SerializeToString()
            for what, request in (("an empty message", empty), ("no message", b"\xff" * 9)):
                with self.subTest(rpc=name, request=what):
                    error = self.refusal(method, request)
                    self.assertEqual(error.code, grpc.StatusCode.UNIMPLEMENTED, error.message)
                    self.assertIn(name, error.message)
                    self.assertEqual(error.reason, "NOT_BUILT")
        self.assertLess(BUILT, seen)
        print(f"{len(seen)} RPCs, {len(seen - BUILT)} of them not built")

    def test_a_service_that_does_not_exist(self):
        for path in ("/attnd.v1.Attention/Sideways", "/attnd.v2.Attention/Forward"):
            with self.subTest(path=path), self.assertRaises(grpc.RpcError) as caught:
                self.channel.unary_unary(path)(b"", timeout=SECONDS)
            self.assertEqual(caught.exception.code(), grpc.StatusCode.UNIMPLEMENTED)


if __name__ == "__main__":
    unittest.main()
