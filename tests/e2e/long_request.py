"""A request that keeps a worker busy for seconds, and a way to know that it does."""

from __future__ import annotations

import os
import pathlib
import time

import numpy as np

from attnd.v1 import attention_pb2, types_pb2

_TICKS = os.sysconf("SC_CLK_TCK")
_BUSY_CPU_SECONDS = 0.3  # Far more than a server spends on the request before it computes.
_POLL_SECONDS = 0.02


class LongRequest:
    """All queries and keys are 0, so that every output row is the mean of V's rows.

    Attributes:
      request: BSHD_BSHD_BSHD [1, 12288, 8, 64] FLOAT32: 309 GFLOP, some seconds of one core. (Or
        as many rows as the environment's ATTND_LONG_ROWS says.)
      mebibytes: of its tensors, the output included.
    """

    def __init__(self) -> None:
        shape = (1, int(os.environ.get("ATTND_LONG_ROWS", "12288")), 8, 64)
        self.mebibytes = 4 * 4 * int(np.prod(shape)) >> 20
        v = np.random.default_rng(5).standard_normal(shape, dtype="f4")
        self._mean = v.mean(axis=1, keepdims=True, dtype="f8")
        self.request = attention_pb2.ForwardRequest()
        self.request.spec.layout = types_pb2.QKV_LAYOUT_BSHD_BSHD_BSHD
        self.request.spec.dtype = types_pb2.DATA_TYPE_FLOAT32
        for name, data in (("q", bytes(v.nbytes)), ("k", bytes(v.nbytes)), ("v", v.tobytes())):
            tensor = getattr(self.request.inputs, name)
            tensor.dtype = types_pb2.DATA_TYPE_FLOAT32
            tensor.shape.extend(shape)
            tensor.data = data

    def check(self, response: attention_pb2.ForwardResponse) -> None:
        """AssertionError unless the response is the answer."""
        out = np.frombuffer(response.out.data, dtype="<f4").reshape(tuple(response.out.shape))
        np.testing.assert_allclose(out, np.broadcast_to(self._mean, out.shape), atol=1e-4)


def cpu_seconds(pid: int) -> float:
    """What all threads of a process have computed so far."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def wait_until_computing(pid: int, before: float, timeout: float = 120) -> None:
    """Returns once a server, idle at cpu_seconds `before`, computes; TimeoutError after that."""
    end = time.monotonic() + timeout
    while cpu_seconds(pid) - before < _BUSY_CPU_SECONDS:
        if time.monotonic() > end:
            raise TimeoutError(f"process {pid} does not compute after {timeout:.0f} s")
        time.sleep(_POLL_SECONDS)
