"""grpcurl.sh against a real server, over TCP and over a Unix socket: grpcurl_test.py.

grpcurl is taken from GRPCURL, else from beside the interpreter (a virtual environment), else from
PATH.
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
from server_process import ServerProcess

SCRIPT = pathlib.Path(__file__).with_name("grpcurl.sh").resolve()
SECONDS = 120


def run_script(address):
    beside = pathlib.Path(sys.executable).parent / "grpcurl"
    environment = dict(os.environ)
    if beside.exists():
        environment.setdefault("GRPCURL", str(beside))
    return subprocess.run(
        [str(SCRIPT), address],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )


class GrpcurlTest(unittest.TestCase):
    def test_every_check_passes_over_tcp_and_over_a_unix_socket(self):
        with tempfile.TemporaryDirectory() as folder:
            listen = ["127.0.0.1:0", f"unix:{folder}/attnd.sock"]
            with ServerProcess(listen=listen) as server:
                for address in server.addresses:
                    with self.subTest(address=address):
                        script = run_script(address)
                        print(script.stdout)
                        self.assertEqual(script.returncode, 0, script.stdout)
                        self.assertRegex(script.stdout, r"(?m)^[1-9]\d* passed, 0 failed$")

    def test_the_script_fails_where_nobody_listens(self):
        with tempfile.TemporaryDirectory() as folder:
            script = run_script(f"unix:{folder}/nobody.sock")
        self.assertEqual(script.returncode, 1, script.stdout)
        self.assertRegex(script.stdout, r"(?m)^0 passed, [1-9]\d* failed$")


if __name__ == "__main__":
    unittest.main(verbosity=2)
