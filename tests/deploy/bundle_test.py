"""deploy/bundle.sh: what it makes runs elsewhere, on nothing but glibc: bundle_test.py.

Makes a bundle of the build that ATTND_SERVER lies in and unpacks its archive in another folder.
"""

import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "e2e"))
from server_process import ServerProcess

SECONDS = 200
MAX_ARCHIVE_BYTES = 48 << 20
MAX_GLIBC = (2, 36)
GLIBC = re.compile(r"(ld-linux-x86-64|lib(c|m|dl|pthread|rt|resolv))\.so\.\d")
GLIBC_VERSION = re.compile(r"\bGLIBC_(\d+)\.(\d+)")
CUDA = re.compile(r"lib(cudart|cudnn|nvrtc)\.so\.\d+")
ENVIRONMENT = {"LD_LIBRARY_PATH": ""}


def output_of(*command):
    return subprocess.run(
        [str(word) for word in command],
        check=True,
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=SECONDS,
    ).stdout


class BundleTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="attnd-bundle-")
        cls.addClassCleanup(folder.cleanup)
        made = pathlib.Path(folder.name) / "made"
        build = pathlib.Path(os.environ["ATTND_SERVER"]).parents[1]
        print(output_of(ROOT / "deploy" / "bundle.sh", build, made))
        cls.archive_bytes = (made.parent / "made.tar.xz").stat().st_size
        with tarfile.open(made.parent / "made.tar.xz") as archive:
            archive.extractall(made.parent / "elsewhere")
        made.rename(made.parent / "gone")
        cls.bundle = made.parent / "elsewhere" / "attnd"
        cls.programs = sorted((cls.bundle / "bin").iterdir())
        cls.libraries = sorted((cls.bundle / "lib").iterdir())

    def test_holds_the_programs_and_is_small(self):
        self.assertEqual([program.name for program in self.programs], ["attnctl", "attnd"])
        self.assertLess(self.archive_bytes, MAX_ARCHIVE_BYTES)

    def test_lacks_no_library_but_those_of_glibc_and_cuda(self):
        there = {library.name for library in self.libraries}
        self.assertIn("libstdc++.so.6", there)
        for file in self.programs + self.libraries:
            for needed in re.findall(r"NEEDED +(\S+)", output_of("objdump", "-p", file)):
                if not GLIBC.fullmatch(needed):
                    module = file.name == "libattnd_cuda.so" and CUDA.fullmatch(needed)
                    self.assertTrue(module or needed in there, f"{file.name} needs {needed}")

    def test_needs_no_newer_glibc(self):
        wanted = [
            ((int(major), int(minor)), file.name)
            for file in self.programs + self.libraries
            for major, minor in GLIBC_VERSION.findall(output_of("objdump", "-T", file))
        ]
        newest, file = max(wanted)
        self.assertLessEqual(newest, MAX_GLIBC, file)

    def test_serves_with_its_own_libraries(self):
        attnctl = self.bundle / "bin" / "attnctl"
        with ServerProcess(str(self.bundle / "bin" / "attnd"), environment=ENVIRONMENT) as server:
            call = [attnctl, f"--address={server.address}"]
            self.assertIn("SERVING", output_of(*call, "health", "--wait", "30"))
            output_of(
                *(*call, "forward", "--layout", "BSHD_BS2HD", "--batch", "1", "--seqlen-q", "32"),
                *("--seqlen-kv", "48", "--heads", "4", "--kv-heads", "2", "--head-dim", "64"),
                *("--dtype", "float32", "--random", "--check"),
            )
            maps = pathlib.Path(f"/proc/{server.pid}/maps").read_text()
        loaded = set(re.findall(r"(/\S+\.so\b\S*)", maps))
        own = {path for path in loaded if pathlib.Path(path).is_relative_to(self.bundle)}
        self.assertIn(str(self.bundle / "lib" / "libstdc++.so.6"), own)
        for path in loaded - own:
            self.assertRegex(pathlib.Path(path).name, GLIBC)


if __name__ == "__main__":
    unittest.main(verbosity=2)
