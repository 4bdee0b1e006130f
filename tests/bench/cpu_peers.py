"""Compares the CPU path with OpenVINO and ONNX Runtime: cpu_peers.py SERVER [options].

Starts the server, and in each round runs every contestant once, one after the other, on the same
inputs: attnd through gRPC (its own compute_us), OpenVINO's scaled_dot_product_attention and ONNX
Runtime's MultiHeadAttention (wall time of the inference), each in its native layout and on all
threads. Prints a Markdown table of medians and minima (on a machine that others use too, the
minimum is the run that they disturbed least), after a check that all computed the same thing.

Needs the packages of client/python, its stubs (client/python/generate.py), and openvino, onnx and
onnxruntime.
"""

import argparse
import pathlib
import statistics
import sys
import time
from collections.abc import Callable

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import openvino
from openvino import opset13

_TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_TESTS / "e2e"))
sys.path.insert(0, str(_TESTS.parent / "client" / "python" / "src"))
import attnd
from server_process import ServerProcess

_SHAPES = {  # name: b, h, s, d
    "1x8x1024x64": (1, 8, 1024, 64),
    "4x12x128x32": (4, 12, 128, 32),
    "1x8x4096x128": (1, 8, 4096, 128),
    "16x16x512x64": (16, 16, 512, 64),
}
_MAX_DIFFERENCE = 2e-4  # Between float32 answers of order 1.

# Runs once and returns (microseconds, out [b, s, h, d]).
Contestant = Callable[[], tuple[float, np.ndarray]]


def attnd_contestant(
    client: attnd.Client, q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool
) -> Contestant:
    mask = "top_left" if causal else "none"

    def run() -> tuple[float, np.ndarray]:
        result = client.forward("BSHD_BSHD_BSHD", q=q, k=k, v=v, causal=mask)
        return result.info.compute_us, result.out.astype(np.float32)

    return run


def openvino_contestant(qkv: list[np.ndarray], threads: int) -> Contestant:
    """OpenVINO's native layout is BHSD."""
    inputs = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in qkv]
    parameters = [opset13.parameter(x.shape, np.float32) for x in inputs]
    node = opset13.scaled_dot_product_attention(*parameters, causal=False)
    config = {
        "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": threads,
    }
    model = openvino.Core().compile_model(openvino.Model([node], parameters), "CPU", config)
    request = model.create_infer_request()
    for index, array in enumerate(inputs):
        request.set_input_tensor(index, openvino.Tensor(array))  # A copy.

    def run() -> tuple[float, np.ndarray]:
        start = time.perf_counter()
        request.infer()
        elapsed = time.perf_counter() - start
        return elapsed * 1e6, request.get_output_tensor(0).data.transpose(0, 2, 1, 3)

    return run


def onnxruntime_contestant(qkv: list[np.ndarray], threads: int) -> Contestant:
    """MultiHeadAttention takes (b, s, h * d), which is BSHD."""
    b, s, h, d = qkv[0].shape
    inputs = {name: x.reshape(b, s, h * d) for name, x in zip("qkv", qkv, strict=True)}
    declare = onnx.helper.make_tensor_value_info
    node = onnx.helper.make_node(
        "MultiHeadAttention", ["q", "k", "v"], ["out"], domain="com.microsoft", num_heads=h
    )
    graph = onnx.helper.make_graph(
        [node],
        "attention",
        [declare(name, onnx.TensorProto.FLOAT, (b, s, h * d)) for name in "qkv"],
        [declare("out", onnx.TensorProto.FLOAT, (b, s, h * d))],
    )
    opsets = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )

    def run() -> tuple[float, np.ndarray]:
        start = time.perf_counter()
        (out,) = session.run(None, inputs)
        return (time.perf_counter() - start) * 1e6, out.reshape(b, s, h, d)

    return run


def measure(contestants: dict[str, Contestant], seconds: float) -> dict[str, list[float]]:
    """Microseconds of interleaved rounds, of which there are at least 5."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for run in contestants.values():
        run()
    end = time.monotonic() + seconds
    rounds = 0
    while rounds < 5 or time.monotonic() < end:
        for name, run in contestants.items():
            # The threads of the contestant before spin for a while after their work.
            time.sleep(0.02)
            times[name].append(run()[0])
        rounds += 1
    return times


def check_same(contestants: dict[str, Contestant]) -> float:
    """Returns the largest difference from attnd's float32 answer."""
    _, expected = contestants["attnd"]()
    worst = 0.0
    for name in ("OpenVINO", "ORT"):
        difference = float(np.abs(contestants[name]()[1] - expected).max())
        worst = max(worst, difference)
        if not difference <= _MAX_DIFFERENCE:
            sys.exit(f"cpu_peers.py: {name} differs from attnd by {difference}")
    return worst


def rows_of(client: attnd.Client, shape: tuple[int, int, int, int], options) -> list[str]:
    b, h, s, d = shape
    rng = np.random.default_rng(1)
    qkv = [rng.standard_normal((b, s, h, d), dtype=np.float32) for _ in range(3)]
    halves = [x.astype(ml_dtypes.bfloat16) for x in qkv]
    contestants = {
        "attnd": attnd_contestant(client, *qkv, causal=False),
        "OpenVINO": openvino_contestant(qkv, options.threads),
        "ORT": onnxruntime_contestant(qkv, options.threads),
        "causal": attnd_contestant(client, *qkv, causal=True),
        "bf16": attnd_contestant(client, *halves, causal=False),
        "bf16 causal": attnd_contestant(client, *halves, causal=True),
    }
    difference = check_same(contestants)
    times = measure(contestants, options.seconds)
    rows = []
    for statistic in (statistics.median, min):
        us = {name: statistic(values) for name, values in times.items()}
        best = min(us["OpenVINO"], us["ORT"])
        cells = [f"{b}, {h}, {s}, {d}", statistic.__name__]
        cells += [f"{us[name]:,.0f}" for name in ("attnd", "OpenVINO", "ORT")]
        cells += [f"{us['attnd'] / best:.2f}", f"{us['causal'] / us['attnd']:.2f}"]
        cells += [f"{us['bf16'] / us['attnd']:.2f}", f"{us['bf16 causal'] / us['bf16']:.2f}"]
        cells.append(f"{difference:.0e}")
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("server", help="path of the attnd program")
    parser.add_argument("--threads", type=int, default=2, help="of each contestant (default: 2)")
    parser.add_argument("--seconds", type=float, default=10, help="per shape (default: 10)")
    parser.add_argument("--shape", choices=_SHAPES, action="append", help="default: all")
    options = parser.parse_args()

    arguments = [f"--threads={options.threads}"]
    print("| (b, h, s, d) | of rounds | attnd us | OpenVINO us | ORT us | attnd / better peer ", end="")
    print("| causal / no mask | bf16 / float32 | bf16: causal / no mask | max difference |")
    print("|---" * 10 + "|")
    with (
        ServerProcess(options.server, arguments=arguments) as server,
        attnd.Client(server.address, timeout=60) as client,
    ):
        for name in options.shape or _SHAPES:
            print("\n".join(rows_of(client, _SHAPES[name], options)), flush=True)


if __name__ == "__main__":
    main()
