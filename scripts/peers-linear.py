#!/usr/bin/env python3
"""Times torch's f16 products (cuBLAS) for the layers of `kvpack bench --suite linear`, and for more rows.

    python3 scripts/peers-linear.py

The script needs an NVIDIA GPU and torch. A row is the median over replays of a CUDA graph. As in the bench, products go
round copies of the weights that together exceed the caches of the device several times. Some outputs are compared with
f64 first.
"""
import statistics
import sys
import time

import torch

# Outputs and inputs.
LAYERS = [(4096, 4096), (8192, 8192), (14336, 4096), (8192, 28672), (5120, 13824)]
ROWS = [1, 4, 8, 16, 256, 512, 4096]
FOOTPRINT = 384 << 20
CHECKED_OUTPUTS = 64
REPLAYS = 9
# Seconds of replays before those that are timed, until the device has raised its clock.
WARM_UP = 0.2
# Of the sum of the absolute products, and of the output.
ALLOWED = 2e-5, 1 / 1024


def product_us(x, weights):
    """Microseconds of a product."""
    products = max(32, 2 * len(weights)) if x.shape[0] <= 256 else 2 * len(weights)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for weight in weights:
            torch.nn.functional.linear(x, weight)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for product in range(products):
                torch.nn.functional.linear(x, weights[product % len(weights)])
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin = time.monotonic()
    while time.monotonic() - begin < WARM_UP:
        graph.replay()
        torch.cuda.synchronize()
    times = []
    for _ in range(REPLAYS):
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / products)
    return statistics.median(times)


def is_right(x, weight):
    got = torch.nn.functional.linear(x, weight)[:, :CHECKED_OUTPUTS].double()
    held = weight[:CHECKED_OUTPUTS].double()
    want = x.double() @ held.T
    allowed = ALLOWED[0] * (x.double().abs() @ held.abs().T) + ALLOWED[1] * want.abs()
    return bool(((got - want).abs() <= allowed).all())


def main():
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, f16")
    right = True
    for outputs, inputs in LAYERS:
        copies = FOOTPRINT // (2 * outputs * inputs) + 2
        weights = [torch.randn(outputs, inputs, dtype=torch.float16, device="cuda") for _ in range(copies)]
        for rows in ROWS:
            x = torch.randn(rows, inputs, dtype=torch.float16, device="cuda") / 64
            if not is_right(x, weights[0]):
                print(f"{outputs} x {inputs}, {rows} rows: wrong")
                right = False
                continue
            us = product_us(x, weights)
            rate = 2e-6 * rows * outputs * inputs / us
            print(f"{outputs} x {inputs}, {rows} rows: {us:.2f} us, {rate:.1f} TFLOP/s", flush=True)
        del weights
        torch.cuda.empty_cache()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
