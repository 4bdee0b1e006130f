"""A small run of support_matrix against a server on the CPU: support_matrix_test.py."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
from server_process import ServerProcess

RUN_SECONDS = 240.0  # Under sanitizers; some five otherwise.
GROUPS = ["3HD", "H3D", "HD_2HD", "HD_H2D", "HD_HD_HD", "SD_SD_SD", "paged", "STRIDED"]
# Fewer of them where sanitizers make each call some ten times slower.
TRIED = os.environ.get("ATTND_SUPPORT_GROUPS", " ".join(GROUPS)).split()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [os.environ["SUPPORT_MATRIX"], *arguments],
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
    )


class SupportMatrixTest(unittest.TestCase):
    def test_every_answer_of_the_cpu_is_confirmed(self) -> None:
        with tempfile.TemporaryDirectory() as folder, ServerProcess() as server:
            page = pathlib.Path(folder) / "SUPPORT.md"
            done = run(
                f"--target=cpu={server.address}",
                f"--output={page}",
                "--requests=1",
                *(f"--group={group}" for group in TRIED),
            )
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            text = page.read_text()
        counts = re.fullmatch(
            r"cpu: planned (\d+), executed (\d+), agreed (\d+) \(100%\), "
            r"refused (\d+), refusals confirmed (\d+)\n",
            done.stdout,
        )
        self.assertIsNotNone(counts, done.stdout)
        planned, executed, agreed, refused, confirmed = map(int, counts.groups())
        self.assertEqual(planned, executed + refused)
        self.assertEqual((agreed, confirmed), (executed, refused))
        self.assertGreater(executed, 50 * len(TRIED))
        self.assertGreater(refused, 30)  # Backward on pages.
        self.assertIn(f"| feature | {' | '.join(GROUPS)} |", text)
        self.assertRegex(text, r"\n\| plain \|.* runs<br>tiled \|")
        self.assertRegex(text, r"refused: `spec\.layout` \[\d+\]")
        self.assertRegex(text, r"- \[\d+\] spec\.layout is paged, and pages have no gradients")

    def test_a_server_that_nobody_runs_is_an_error(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            done = run(f"--target=cpu=unix:{folder}/none.sock", "--connect-seconds=1")
        self.assertEqual(done.returncode, 1)
        self.assertIn("DEADLINE_EXCEEDED", done.stderr)

    def test_a_target_has_a_name(self) -> None:
        self.assertEqual(run("--target=unix:/tmp/none.sock").returncode, 2)


if __name__ == "__main__":
    unittest.main()
