"""Decoding in a CUDA graph: captured once for every kind of step, and replayed while sequences grow.

    python examples/cuda_graph.py

Needs an NVIDIA GPU, PyTorch and a wheel with the feature cuda.
"""

import torch

import kvpack

LAYERS, HEADS, KV_HEADS, CHANNELS, BATCH = 4, 32, 8, 128, 3


def main():
    cache = kvpack.Cache(layers=LAYERS, query_heads=HEADS, kv_heads=KV_HEADS, head_dim=CHANNELS, recipe="saw-int4",
                         sequences=BATCH, device="cuda:0")
    cache.prepare()  # no step compiles kernels
    cache.reserve([(sequence, 1000, "chunk") for sequence in range(BATCH)])  # and none allocates
    hidden = torch.randn(BATCH, HEADS * CHANNELS, device="cuda", dtype=torch.float16)
    project = torch.randn(HEADS * CHANNELS, (HEADS + 2 * KV_HEADS) * CHANNELS, device="cuda", dtype=torch.float16) / 64
    hidden @ project  # cuBLAS allocates in its first call, which no graph may hold
    graphs, captured = {}, 0

    def layers(step):
        rows = hidden
        for layer in range(LAYERS):
            queries, keys, values = (rows @ project).split([HEADS * CHANNELS, *[KV_HEADS * CHANNELS] * 2], dim=-1)
            heads = lambda x: x.reshape(BATCH, -1, CHANNELS).contiguous()
            rows = step.store_attend(layer, heads(keys), heads(values), heads(queries)).view(BATCH, -1)
        return rows

    for _ in range(300):
        step = cache.begin(list(range(BATCH)))
        if step.bound_anew or step.graph not in graphs:
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                output = layers(step)
            graphs[step.graph] = (graph, output, step)  # the step keeps what the graph reads and writes
            captured += 1
        graph, output, _ = graphs[step.graph]
        graph.replay()
        step.replayed()
        step.commit()
        hidden.copy_(output)
    print(f"{captured} graphs for {cache.length(0)} steps")
    assert captured < 30 and cache.length(0) == 300 and torch.isfinite(hidden).all()


if __name__ == "__main__":
    main()
