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


def median_us(call):
    def waited():
        call()
        torch.cuda.synchronize()

    for _ in range(3):
        waited()
    start = time.perf_counter()
    waited()
    calls = max(1, min(1000, int(0.04 / (time.perf_counter() - start))))
    times = []
    for _ in range(11):
        start = time.perf_counter()
        for _ in range(calls):
            waited()
        times.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(times)


def time_case(b, h, g, s, d_qk, d_v, causal):
    """-> microseconds of the forward and of the backward pass."""

    def tensor(heads, dim):
        values = torch.rand(b, s, heads, dim, device="cuda", dtype=torch.bfloat16).mul(2).sub(1)
        return values.transpose(1, 2).requires_grad_()

    q, k, v = tensor(h, d_qk), tensor(g, d_qk), tensor(g, d_v)

    def attention():
        return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=h != g)

    with torch.no_grad():
        forward = median_us(attention)
    out = attention()
    d_out = torch.randn_like(out)
    return forward, median_us(lambda: torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True))


def main():
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        for case in CASES:
            b, h, g, s, d_qk, d_v, causal = case
            dims = d_qk if d_qk == d_v else f"{d_qk}/{d_v}"
            name = f"{b},{h}/{g},{s},{dims}{' causal' if causal else ''}"
            for what, us in zip(("", " backward"), time_case(*case)):
                print(f"| {name}{what} | PyTorch {torch.__version__} cuDNN, us | {us:.1f} |", flush=True)


if __name__ == "__main__":
    main()
