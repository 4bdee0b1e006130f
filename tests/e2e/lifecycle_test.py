"""The server's life: settings, addresses, health, signals and logs; lifecycle_test.py."""

import contextlib
import json
import os
import pathlib
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import unittest

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import sample_requests
from long_request import LongRequest, cpu_seconds, wait_until_computing
from server_process import ServerProcess

import attnd
from attnd.v1 import attention_pb2_grpc

SECONDS = 120
LOCAL = "127.0.0.1:0"
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # Whatever machine runs this.
SERVING, NOT_SERVING, UNKNOWN = (
    health_pb2.HealthCheckResponse.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING,
    health_pb2.HealthCheckResponse.SERVICE_UNKNOWN,
)


class SignalledServer(ServerProcess):
    """A server that a test ends itself."""

    def signal(self, number):
        self._process.send_signal(number)

    def wait(self):
        """The exit code."""
        return self._process.wait(SECONDS)


def run_to_end(*arguments, environment=None):
    """(exit code, standard output, standard error) of a server that must end by itself."""
    result = subprocess.run(
        [os.environ["ATTND_SERVER"], *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=os.environ | (environment or {}),
    )
    return result.returncode, result.stdout, result.stderr


@contextlib.contextmanager
def addresses_of(*arguments, count=1, environment=None):
    """Runs a server with exactly these arguments; the value is its first `count` addresses."""
    process = subprocess.Popen(
        [os.environ["ATTND_SERVER"], *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | (environment or {}),
    )
    lines = queue.Queue()

    def read():
        for line in process.stdout:
            lines.put(line)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        got = [lines.get(timeout=SECONDS) for _ in range(count)]
        yield [line.removeprefix("listening on ").strip() for line in got]
    finally:
        process.terminate()
        try:
            process.wait(SECONDS)
        finally:
            process.kill()
            reader.join(SECONDS)
            process.stdout.close()


class LifecycleTest(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory(prefix="attnd-")))

    def check_serves(self, address):
        """A good request through this address is answered rightly."""
        known = sample_requests.KnownRequest()
        with sample_requests.open_channel(address) as channel:
            attention = attention_pb2_grpc.AttentionStub(channel)
            known.check(attention.Forward(known.request, timeout=SECONDS))

    def check_fails(self, code, words, *arguments, environment=None):
        """The server ends with the code and a sentence with these words, and serves nothing."""
        with self.subTest(arguments=arguments, environment=environment):
            exit_code, output, error = run_to_end(*arguments, environment=environment)
            self.assertEqual(exit_code, code, error)
            self.assertEqual(output, "")
            for word in words:
                self.assertIn(word, error)

    # ------------------------------------------------------------------------------- addresses

    def test_every_address_is_printed_and_serves(self):
        listen = [LOCAL, LOCAL, f"unix:{self.folder}/attnd.sock"]
        with ServerProcess(listen=listen) as server:
            self.assertEqual(len(set(server.addresses)), 3)
            self.assertNotIn(LOCAL, server.addresses)
            self.assertEqual(server.addresses[2], listen[2])
            for address in server.addresses:
                self.check_serves(address)

    def test_an_address_in_use_ends_the_second_server(self):
        listen = [LOCAL, f"unix:{self.folder}/attnd.sock"]
        with ServerProcess(listen=listen) as server:
            for address in server.addresses:
                self.check_fails(1, ["cannot listen", address], f"--listen={address}")
                self.check_serves(address)

    def test_a_socket_file_without_a_server_is_taken_over(self):
        path = self.folder / "attnd.sock"
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
        self.assertTrue(path.is_socket())
        with ServerProcess(listen=[f"unix:{path}"]) as server:
            self.check_serves(server.address)

    def test_plaintext_beyond_loopback_must_be_allowed(self):
        self.check_fails(2, ["--insecure", "0.0.0.0:0"], "--listen=0.0.0.0:0")
        with ServerProcess(listen=["0.0.0.0:0"], arguments=["--insecure"]) as server:
            self.check_serves(f"127.0.0.1:{server.address.rpartition(':')[2]}")

    def test_health_alone_on_its_own_address(self):
        arguments = (f"--listen={LOCAL}", f"--health-listen={LOCAL}")
        with addresses_of(*arguments, count=2) as (main, lone):
            self.check_serves(main)
            with sample_requests.open_channel(lone) as channel:
                health = health_pb2_grpc.HealthStub(channel)
                answer = health.Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
                self.assertEqual(answer.status, SERVING)
                attention = attention_pb2_grpc.AttentionStub(channel)
                with self.assertRaises(grpc.RpcError) as caught:
                    attention.Forward(sample_requests.sample("BS3HD"), timeout=SECONDS)
                self.assertEqual(caught.exception.code(), grpc.StatusCode.UNIMPLEMENTED)

    # ------------------------------------------------------------------------------- settings

    def test_settings_that_are_wrong_or_not_built_end_the_program(self):
        fails = self.check_fails
        fails(2, ["--nonsense"], "--nonsense")
        fails(2, ["surplus"], "surplus")
        fails(2, ["--threads", "many"], "--threads=many")
        fails(2, ["--listen", "nowhere"], "--listen=nowhere")
        fails(2, ["--metrics-listen", "not built"], "--metrics-listen=127.0.0.1:0")
        fails(2, ["--tls-cert", "not built"], "--tls-cert=cert.pem")
        fails(2, ["ATTND_THREADS", "x"], environment={"ATTND_THREADS": "x"})
        fails(2, ["ATTND_TOKENS", "not built"], environment={"ATTND_TOKENS": "f"})
        fails(2, ["--config", "absent.toml"], f"--config={self.folder}/absent.toml")
        for text, words in (
            ('listne = ["127.0.0.1:0"]', ["listne"]),
            ('devices = "0"', ["devices", "not built"]),
            ("threads = [", ["settings.toml"]),
        ):
            (self.folder / "settings.toml").write_text(f"{text}\n")
            fails(2, words, f"--config={self.folder}/settings.toml")

    def test_without_a_gpu_the_cpu_serves_and_says_why(self):
        self.check_fails(
            1, ["--backend=cuda: "], "--backend=cuda", f"--listen={LOCAL}", environment=NO_GPU
        )
        with ServerProcess(
            backend="auto", arguments=["--log-format=json"], environment=NO_GPU
        ) as server:
            pass
        lines = [json.loads(line) for line in server.stderr().splitlines()]
        serving = [line for line in lines if line["msg"] == "serving"]
        self.assertEqual([line["backend"] for line in serving], ["cpu"])
        self.assertRegex(serving[0]["why"], "CUDA|NVIDIA|GPU|driver")

    def test_version_and_help(self):
        for flag, word in (("--version", "attnd"), ("--help", "--listen")):
            exit_code, output, error = run_to_end(flag)
            self.assertEqual((exit_code, error), (0, ""))
            self.assertIn(word, output)

    def test_a_flag_beats_the_environment_which_beats_the_file(self):
        file = self.folder / "settings.toml"
        file.write_text('max-queue = "1MiB"\npinned-pool = "64MiB"\n')
        config = f"--config={file}"
        variable = {"ATTND_MAX_QUEUE": "2MiB"}
        for mib, arguments, environment in (
            (1, [config], {}),
            (1, [], {"ATTND_CONFIG": str(file)}),
            (2, [config], variable),
            (3, [config, "--max-queue=3MiB"], variable),
        ):
            with (
                self.subTest(mib=mib),
                ServerProcess(arguments=arguments, environment=environment) as server,
                attnd.Client(server.address, timeout=SECONDS) as client,
            ):
                limits = client.capabilities().limits
                self.assertEqual(limits.queue_bytes, mib << 20)
                self.assertEqual(limits.pool_bytes, 64 << 20)

    def test_addresses_of_the_file_and_the_environment(self):
        in_file, in_variable, in_flag = (f"unix:{self.folder}/{n}.sock" for n in ("a", "b", "c"))
        file = self.folder / "settings.toml"
        file.write_text(f'listen = ["{in_file}", "{LOCAL}"]\n')
        config, variable = f"--config={file}", {"ATTND_LISTEN": in_variable}
        with addresses_of(config, count=2) as addresses:
            self.assertEqual(addresses[0], in_file)
        with addresses_of(config, environment=variable) as addresses:
            self.assertEqual(addresses, [in_variable])
            self.check_serves(in_variable)
        with addresses_of(config, f"--listen={in_flag}", environment=variable) as addresses:
            self.assertEqual(addresses, [in_flag])

    # ------------------------------------------------------------------------------- health, end

    def test_health_names_the_services(self):
        with (
            ServerProcess() as server,
            sample_requests.open_channel(server.address) as channel,
        ):
            health = health_pb2_grpc.HealthStub(channel)
            for service in ("", "attnd.v1.Attention", "attnd.v1.Admin"):
                request = health_pb2.HealthCheckRequest(service=service)
                self.assertEqual(health.Check(request, timeout=SECONDS).status, SERVING)
                watch = health.Watch(request, timeout=SECONDS)
                self.assertEqual(next(watch).status, SERVING)
                watch.cancel()
            nobody = health_pb2.HealthCheckRequest(service="attnd.v9.Nobody")
            with self.assertRaises(grpc.RpcError) as caught:
                health.Check(nobody, timeout=SECONDS)
            self.assertEqual(caught.exception.code(), grpc.StatusCode.NOT_FOUND)
            watch = health.Watch(nobody, timeout=SECONDS)
            self.assertEqual(next(watch).status, UNKNOWN)
            watch.cancel()

    def test_watch_sees_the_drain(self):
        with (
            SignalledServer(arguments=["--drain-delay=1s"]) as server,
            sample_requests.open_channel(server.address) as channel,
        ):
            health = health_pb2_grpc.HealthStub(channel)
            watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=SECONDS)
            self.assertEqual(next(watch).status, SERVING)
            server.signal(signal.SIGTERM)
            self.assertEqual(next(watch).status, NOT_SERVING)
            with self.assertRaises(grpc.RpcError) as caught:
                next(watch)
            self.assertEqual(caught.exception.code(), grpc.StatusCode.UNAVAILABLE)
            self.assertEqual(server.wait(), 0)

    def test_signals_let_the_request_in_flight_end(self):
        long = LongRequest()
        for number in (signal.SIGTERM, signal.SIGINT):
            arguments = ["--threads=1", f"--drain-timeout={SECONDS}s"]
            with (
                self.subTest(signal=number.name),
                SignalledServer(arguments=arguments) as server,
                sample_requests.open_channel(server.address) as channel,
            ):
                before = cpu_seconds(server.pid)
                attention = attention_pb2_grpc.AttentionStub(channel)
                future = attention.Forward.future(long.request, timeout=SECONDS)
                wait_until_computing(server.pid, before)
                server.signal(number)
                long.check(future.result())
                channel.close()
                self.assertEqual(server.wait(), 0)

    def test_logs_are_one_json_object_on_each_line(self):
        with SignalledServer(arguments=["--log-format=json", "--log-level=trace"]) as server:
            self.check_serves(server.address)
            bad = sample_requests.sample("STRIDED").SerializeToString()
            with sample_requests.open_channel(server.address) as channel:
                raw = channel.unary_unary("/attnd.v1.Attention/Forward")
                for request in (b"\xff", bad.replace(b"qkv", b"\xff\xfe\xfd")):
                    with self.assertRaises(grpc.RpcError):
                        raw(request, timeout=SECONDS)
            server.signal(signal.SIGTERM)
            self.assertEqual(server.wait(), 0)
            records = [json.loads(line) for line in server.stderr().splitlines()]
        messages = [record["msg"] for record in records]
        self.assertEqual(messages[0], "serving")
        self.assertEqual(messages[-2:], ["draining", "stopped"])
        for record in records:
            self.assertEqual({"ts", "level", "msg"} - set(record), set())


if __name__ == "__main__":
    unittest.main()
