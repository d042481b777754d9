#!/usr/bin/env python3
"""Times torch's f16 attention (SDPA with cuDNN): the decode steps of `kvpack bench --suite decode`, and the causal
prefill of one sequence, to which `kvpack bench --suite evict` compares the statistics of a prompt.

    python3 scripts/peers.py >peers.json

The script needs an NVIDIA GPU and torch. A row is the median over replays of a CUDA graph. As in `kvpack bench --backend
cuda`, each step of the graph uses the next of several KV caches, which together exceed the caches of the device. The
outputs of one sequence are compared with f64 first. JSON goes to standard output, and rows go to standard error as they
come.
"""
import datetime
import json
import re
import statistics
import sys
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

HEAD_DIM = 128
# Name in kvpack's registry: sequences, query heads, KV heads, tokens.
SHAPES = {
    "g4-b8-32k": (8, 32, 8, 32768),
    "g4-b32-8k": (32, 32, 8, 8192),
    "g1-b8-8k": (8, 32, 32, 8192),
    "g4-b1-4k": (1, 32, 8, 4096),
    "g4-b1-128k": (1, 32, 8, 131072),
    "g8-b8-32k": (8, 64, 8, 32768),
}
# Query heads, KV heads and tokens of the prompts of `kvpack bench --suite evict`.
PROMPTS = [(32, 8, 32768), (32, 8, 131072)]
# The newest queries of a prompt, which are compared with f64.
CHECKED_QUERIES = 8
FOOTPRINT = 1 << 30
MOST_COPIES = 64
STEPS_OF_A_GRAPH = 64
REPLAYS = 9
# Seconds of work before what is timed, until the device has raised its clock: those of `kvpack bench --backend cuda`.
WARM_UP = 0.2
LARGEST_NMSE = 1e-5


def attend(query, keys, values):
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        grouped = query.shape[1] != keys.shape[1]
        return torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=grouped)


def nmse(query, keys, values):
    """The NMSE of the first sequence against f64."""
    group = query.shape[1] // keys.shape[1]
    want = torch.empty(query.shape[1], HEAD_DIM, dtype=torch.float64, device="cuda")
    for head in range(query.shape[1]):
        scores = keys[0, head // group].double() @ query[0, head, 0].double() / HEAD_DIM**0.5
        want[head] = torch.softmax(scores, 0) @ values[0, head // group].double()
    got = attend(query[:1], keys[:1], values[:1])[0, :, 0].double()
    return ((got - want).square().sum() / want.square().sum()).item()


def warm_up(work):
    """Runs work until the device has raised its clock."""
    begin = time.monotonic()
    while time.monotonic() - begin < WARM_UP:
        work()
        torch.cuda.synchronize()


def step_us(query, caches):
    steps = -(-STEPS_OF_A_GRAPH // len(caches)) * len(caches)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for keys, values in caches:
            attend(query, keys, values)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for step in range(steps):
                attend(query, *caches[step % len(caches)])
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    warm_up(graph.replay)
    times = []
    for _ in range(REPLAYS):
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / steps)
    return statistics.median(times)


def prefill(query_heads, kv_heads, tokens):
    """Microseconds of causal attention of a whole prompt, and the NMSE of its newest queries against f64."""
    half = {"device": "cuda", "dtype": torch.float16}
    query = torch.randn(1, query_heads, tokens, HEAD_DIM, **half)
    keys, values = (torch.randn(1, kv_heads, tokens, HEAD_DIM, **half) for _ in range(2))

    def call():
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            return torch.nn.functional.scaled_dot_product_attention(
                query, keys, values, is_causal=True, enable_gqa=True
            )

    got = call()[0, :, -CHECKED_QUERIES:].double()
    positions = torch.arange(tokens, device="cuda")
    visible = positions <= positions[-CHECKED_QUERIES:, None]
    want = torch.empty_like(got)
    for head in range(query_heads):
        of = head // (query_heads // kv_heads)
        scores = query[0, head, -CHECKED_QUERIES:].double() @ keys[0, of].double().T / HEAD_DIM**0.5
        want[head] = torch.softmax(scores.masked_fill(~visible, float("-inf")), -1) @ values[0, of].double()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    warm_up(call)
    times = []
    for _ in range(REPLAYS):
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return statistics.median(times), ((got - want).square().sum() / want.square().sum()).item()


def driver():
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            found = re.search(r"\b\d+(\.\d+)+\b", file.read())
    except OSError:
        found = None
    return f"NVIDIA {found.group(0)}" if found else "unknown"


def main():
    torch.manual_seed(0)
    cudnn = torch.backends.cudnn.version()
    cudnn = f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}"
    peer = f"torch {torch.__version__.split('+')[0]} SDPA, cuDNN {cudnn}"
    rows = []
    for name, (sequences, query_heads, kv_heads, tokens) in SHAPES.items():
        size = sequences, kv_heads, tokens, HEAD_DIM
        step_bytes = 2 * 2 * sequences * kv_heads * tokens * HEAD_DIM
        copies = max(2, min(MOST_COPIES, -(-FOOTPRINT // step_bytes)))
        half = {"device": "cuda", "dtype": torch.float16}
        try:
            caches = [(torch.randn(size, **half), torch.randn(size, **half)) for _ in range(copies)]
            query = torch.randn(sequences, query_heads, 1, HEAD_DIM, **half)
            error = nmse(query, *caches[0])
            if not error <= LARGEST_NMSE:
                print(f"{name}: wrong, NMSE {error:.0e}", file=sys.stderr, flush=True)
                continue
            us = step_us(query, caches)
        except RuntimeError as reason:
            print(f"{name}: {str(reason).splitlines()[0]}", file=sys.stderr, flush=True)
            continue
        finally:
            caches = query = None
            torch.cuda.empty_cache()
        print(f"{name}: {us:.1f} us, NMSE {error:.0e}", file=sys.stderr, flush=True)
        rows.append({"peer": peer, "shape": name, "format": "f16", "step_us": us})
    prompts = []
    for query_heads, kv_heads, tokens in PROMPTS:
        try:
            us, error = prefill(query_heads, kv_heads, tokens)
        except RuntimeError as reason:
            print(f"prefill of {tokens} tokens: {str(reason).splitlines()[0]}", file=sys.stderr, flush=True)
            continue
        finally:
            torch.cuda.empty_cache()
        print(f"prefill of {tokens} tokens: {us:.0f} us, NMSE {error:.0e}", file=sys.stderr, flush=True)
        if error <= LARGEST_NMSE:
            prompts.append({"query_heads": query_heads, "kv_heads": kv_heads, "tokens": tokens, "prefill_us": us})
    report = {
        "kind": "peers",
        "device": torch.cuda.get_device_name(),
        "driver": driver(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": "python3 scripts/peers.py",
        "rows": rows,
        "prompts": prompts,
    }
    json.dump(report, sys.stdout, indent=2)
    print()
    return 0 if len(rows) == len(SHAPES) and len(prompts) == len(PROMPTS) else 1


if __name__ == "__main__":
    sys.exit(main())
