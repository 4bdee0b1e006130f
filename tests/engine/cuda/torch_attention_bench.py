"""Times PyTorch's cuDNN attention on the shapes of cuda_attention_bench; prints table rows."""

import statistics
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

CASES = [  # b, h, g, s, d_qk, d_v, causal
    (4, 16, 16, 4096, 128, 128, False),
    (4, 16, 16, 4096, 128, 128, True),
    (1, 64, 8, 16384, 128, 128, False),
    (1, 64, 8, 16384, 128, 128, True),
    (1, 64, 8, 2048, 128, 128, True),
    (2, 128, 128, 4096, 192, 128, True),
]


def time_case(b, h, g, s, d_qk, d_v, causal):
    def tensor(heads, dim):
        return torch.rand(b, s, heads, dim, device="cuda", dtype=torch.bfloat16).mul(2).sub(1).transpose(1, 2)

    q, k, v = tensor(h, d_qk), tensor(g, d_qk), tensor(g, d_v)

    def call():
        scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=h != g)
        torch.cuda.synchronize()

    for _ in range(3):
        call()
    start = time.perf_counter()
    call()
    calls = max(1, min(1000, int(0.04 / (time.perf_counter() - start))))
    times = []
    for _ in range(11):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(times)


def main():
    with torch.no_grad(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        for case in CASES:
            b, h, g, s, d_qk, d_v, causal = case
            dims = d_qk if d_qk == d_v else f"{d_qk}/{d_v}"
            name = f"{b},{h}/{g},{s},{dims}{' causal' if causal else ''}"
            print(f"| {name} | PyTorch {torch.__version__} cuDNN, us | {time_case(*case):.1f} |", flush=True)


if __name__ == "__main__":
    main()
