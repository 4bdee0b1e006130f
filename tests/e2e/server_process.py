"""A real attnd server for the duration of a test."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

_START_SECONDS = 30.0
_STOP_SECONDS = 30.0
_POLL_SECONDS = 0.02
_PREFIX = "listening on "


class ServerError(AssertionError):
    """The server did not start or stop as it should; the message ends with its standard error."""


class ServerProcess:
    """Starts the server, waits until it listens, and stops it with SIGTERM.

        with ServerProcess() as server:
            client = attnd.Client(server.address)

    The `with` statement demands that a server still running at its end exits with 0. Where the
    block fails, the server's standard error is printed.

    Args:
      binary: the program; default: the environment's ATTND_SERVER.
      backend: what computes.
      listen: addresses to listen on; port 0 picks a free one.
      arguments: more command line arguments.
      environment: variables added to this process's.

    Attributes:
      addresses: the bound addresses, in the order of `listen`; address is the first.
      pid: process id.
    """

    def __init__(
        self,
        binary: str | None = None,
        *,
        backend: str = "cpu",
        listen: Sequence[str] = ("127.0.0.1:0",),
        arguments: Sequence[str] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        command = [binary or os.environ["ATTND_SERVER"], f"--backend={backend}", *arguments]
        command += [f"--listen={address}" for address in listen]
        self._folder = tempfile.TemporaryDirectory(prefix="attnd-test-")
        self._stdout = pathlib.Path(self._folder.name) / "stdout"
        self._stderr = pathlib.Path(self._folder.name) / "stderr"
        with self._stdout.open("wb") as stdout, self._stderr.open("wb") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=os.environ | (environment or {}),
            )
        self.pid = self._process.pid
        self._last_words: str | None = None  # Standard error, once the process has ended.
        try:
            self.addresses = self._wait_for_addresses(len(listen))
        except BaseException:
            self._kill()
            raise
        self.address = self.addresses[0]

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, exception_type: type | None, *exception: object) -> None:
        if exception_type is not None:
            self._kill()
            print(self.stderr(), file=sys.stderr)
            return
        exit_code = self.stop()
        if exit_code != 0:
            raise ServerError(f"the server ended with {exit_code}\n{self.stderr()}")

    def stderr(self) -> str:
        """What the server has written to standard error so far."""
        if self._last_words is not None:
            return self._last_words
        return self._stderr.read_text(errors="replace")

    def stop(self) -> int:
        """Sends SIGTERM to a running server and returns the exit code (negative: the signal)."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            exit_code = self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()
            raise ServerError(
                f"the server did not end within {_STOP_SECONDS:.0f} s of SIGTERM\n{self.stderr()}"
            ) from None
        self._remove_files()
        return exit_code

    def _wait_for_addresses(self, count: int) -> list[str]:
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            ended = self._process.poll()
            lines = self._stdout.read_text().splitlines(keepends=True)
            addresses = [
                line.removeprefix(_PREFIX).strip()
                for line in lines
                if line.startswith(_PREFIX) and line.endswith("\n")
            ]
            if len(addresses) == count:
                return addresses
            if ended is not None:
                raise ServerError(f"the server ended with {ended} at start\n{self.stderr()}")
            time.sleep(_POLL_SECONDS)
        raise ServerError(
            f"the server does not listen after {_START_SECONDS:.0f} s\n{self.stderr()}"
        )

    def _kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(_STOP_SECONDS)
        self._remove_files()

    def _remove_files(self) -> None:
        self._last_words = self.stderr()
        self._folder.cleanup()
