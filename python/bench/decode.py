"""What decoding costs on a card with kvpack, DynamicCache and QuantizedCache: ``python bench/decode.py --help``.

Shapes are those of an 8B model: 32 layers, 32 query heads over 8 KV heads of 128 channels. Keys, values, queries and
weights are random. Every figure is a median.
"""

import argparse
import statistics
import time

import torch
import transformers
from transformers.cache_utils import DynamicCache, QuantizedCache

import kvpack
import kvpack.hf

LAYERS, HEADS, KV_HEADS, CHANNELS = 32, 32, 8, 128
DTYPE = torch.bfloat16
PART = 1024
QUANTIZED = ("hqq", "quanto")
GRAPHS, COMPILED = "graphs:", "compiled:"
SDPA = [torch.nn.attention.SDPBackend.FLASH_ATTENTION, torch.nn.attention.SDPBackend.CUDNN_ATTENTION]


def rows(count, heads):
    return torch.randn(count, heads, CHANNELS, device="cuda", dtype=DTYPE)


def free_bytes():
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def filled(recipe, batch, tokens):
    """A cache that holds random tokens."""
    cache = kvpack.Cache(layers=LAYERS, query_heads=HEADS, kv_heads=KV_HEADS, head_dim=CHANNELS, recipe=recipe,
                         sequences=batch, device="cuda:0", stream=torch.cuda.current_stream().cuda_stream)
    if not recipe.startswith("kivi"):  # chunks of such recipes stay in f16
        cache.reserve([(sequence, tokens + 256, "chunk") for sequence in range(batch)])
    for sequence in range(batch):
        for first in range(0, tokens, PART):
            part = min(PART, tokens - first)
            with cache.begin([(sequence, part)]) as step:
                for layer in range(LAYERS):
                    step.store(layer, rows(part, KV_HEADS), rows(part, KV_HEADS))
    cache.trim()
    return cache


def overhead():
    """Host time of a layer, while the device is busy with something else: nothing waits for it."""
    cache = filled("saw-int4", 1, 1000)
    cache.prepare()
    keys, values, queries = rows(1, KV_HEADS), rows(1, KV_HEADS), rows(1, HEADS)
    out, kept = torch.empty_like(queries), torch.empty_like(keys)
    dense = [x.view(1, 1, -1, CHANNELS).transpose(1, 2) for x in (keys, values, queries)]
    past = DynamicCache()
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def torch_layer(layer):
        k, v = past.update(dense[0], dense[1], layer)
        sdpa(dense[2], k, v, enable_gqa=True)

    calls = {
        "store_attend, out=": lambda step, layer: step.store_attend(layer, keys, values, queries, out=out),
        "store_attend": lambda step, layer: step.store_attend(layer, keys, values, queries),
        "store, attend": lambda step, layer: (step.store(layer, keys, values), step.attend(layer, queries)),
        "store": lambda step, layer: step.store(layer, keys, values),
        "one kernel of PyTorch": lambda step, layer: torch.add(keys, values, out=kept),
        "PyTorch's cat": lambda step, layer: torch.cat(dense[:1] * 2, -2),
        "SDPA": lambda step, layer: sdpa(dense[2], dense[0], dense[1], enable_gqa=True),
        "DynamicCache.update, SDPA": lambda step, layer: torch_layer(layer),
    }
    for name, call in calls.items():
        layers, begins, commits = [], [], []
        for turn in range(40):
            torch.cuda.synchronize()
            torch.cuda._sleep(40_000_000)
            times = [time.perf_counter()]
            step = cache.begin([0])
            times.append(time.perf_counter())
            for layer in range(LAYERS):
                call(step, layer)
            times.append(time.perf_counter())
            step.commit() if "store" in name else step.abandon()
            times.append(time.perf_counter())
            if turn >= 10:
                begins.append(times[1] - times[0])
                layers.append((times[2] - times[1]) / LAYERS)
                commits.append(times[3] - times[2])
        torch.cuda.synchronize()
        us = [1e6 * statistics.median(of) for of in (begins, layers, commits)]
        print(f"host | {name} | begin {us[0]:.1f} µs | layer {us[1]:.1f} µs | commit {us[2]:.1f} µs", flush=True)


def attention_of(recipe, batch, tokens, steps):
    """Wall time of the attention part of a step, eager and in a graph, per layer; bytes of the cache."""
    before = free_bytes()
    cache = filled(recipe, batch, tokens)
    cache.prepare()
    sets = [[rows(batch, KV_HEADS), rows(batch, KV_HEADS), rows(batch, HEADS)] for _ in range(LAYERS)]
    outs = [torch.empty_like(of[2]) for of in sets]
    least, eager, graphed, graphs = free_bytes(), [], [], {}
    for turn in range(2 * steps + 6):
        in_graph = turn >= steps + 3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if in_graph:
            step = cache.begin(list(range(batch)))
            fresh = step.bound_anew or step.graph not in graphs
            if fresh:
                graph = torch.cuda.CUDAGraph()
                torch.cuda.synchronize()
                with torch.cuda.graph(graph):
                    for layer in range(LAYERS):
                        step.store_attend(layer, *sets[layer], out=outs[layer])
                graphs[step.graph] = (graph, step)
            begin.record()
            graphs[step.graph][0].replay()
            end.record()
            step.replayed()
        else:
            begin.record()
            step = cache.begin(list(range(batch)))
            for layer in range(LAYERS):
                step.store_attend(layer, *sets[layer], out=outs[layer])
            end.record()
        step.commit()
        least = min(least, free_bytes())
        if turn % (steps + 3) >= 3 and not (in_graph and fresh):
            (graphed if in_graph else eager).append(begin.elapsed_time(end))
    allocated = cache.memory()["allocated_bytes"]
    return [1e3 * statistics.median(of) / LAYERS for of in (eager, graphed)], allocated, before - least


def dense_attention(batch, tokens, steps):
    """The same with DynamicCache and SDPA."""
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    past = DynamicCache()
    for layer in range(LAYERS):
        of = [torch.randn(batch, KV_HEADS, tokens, CHANNELS, device="cuda", dtype=DTYPE) for _ in range(2)]
        past.update(*of, layer)
    sets = [[torch.randn(batch, heads, 1, CHANNELS, device="cuda", dtype=DTYPE) for heads in
             (KV_HEADS, KV_HEADS, HEADS)] for _ in range(LAYERS)]
    both = []
    for turn in range(steps + 3):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        held = []
        for layer, (k, v, q) in enumerate(sets):
            held.append((q, *past.update(k, v, layer)))
            torch.nn.functional.scaled_dot_product_attention(*held[-1], enable_gqa=True)
        events[1].record()
        torch.cuda.synchronize()
        if turn >= 3:
            both.append(events[0].elapsed_time(events[1]))
    peak = torch.cuda.max_memory_allocated() - start
    return 1e3 * statistics.median(both) / LAYERS, {of.name: sdpa_alone(of, held, steps) for of in SDPA}, peak


def sdpa_alone(backend, held, steps):
    """The attention of all layers in a graph, without the host and the copies of ``DynamicCache``; None if it fails."""
    def layers():
        for q, keys, values in held:
            torch.nn.functional.scaled_dot_product_attention(q, keys, values, enable_gqa=True)

    times, graph = [], torch.cuda.CUDAGraph()
    try:
        with torch.nn.attention.sdpa_kernel(backend):
            layers()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                layers()
    except RuntimeError as failed:
        print(f"{backend.name}: {str(failed)[:100]}", flush=True)
        return None
    for _ in range(steps + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return 1e3 * statistics.median(times[3:]) / LAYERS


def attention(batch, tokens, steps):
    try:
        both, alone, peak = dense_attention(batch, tokens, steps)
        alone = ", ".join(f"{name} {us:.1f} µs" for name, us in alone.items() if us is not None)
        print(f"attention | {batch} × {tokens} | DynamicCache + SDPA bf16 | eager {both:.1f} µs; SDPA in a graph: "
              f"{alone} | peak {peak / 2**30:.2f} GiB", flush=True)
    except torch.cuda.OutOfMemoryError:
        print(f"attention | {batch} × {tokens} | DynamicCache + SDPA bf16 | out of memory", flush=True)
    torch.cuda.empty_cache()
    for recipe in ("saw-int4", "kivi:4", "f16"):
        try:
            (eager, graphed), bytes_of, taken = attention_of(recipe, batch, tokens, steps)
            print(f"attention | {batch} × {tokens} | {recipe} | eager {eager:.1f} µs, graph {graphed:.1f} µs | "
                  f"cache {bytes_of / 2**30:.2f} GiB, device {taken / 2**30:.2f} GiB", flush=True)
        except kvpack.NoRoom as full:
            print(f"attention | {batch} × {tokens} | {recipe} | {full}", flush=True)
        torch.cuda.empty_cache()


def model_of_8b():
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=CHANNELS, max_position_embeddings=262144,
        attn_implementation="sdpa")
    torch.set_default_dtype(DTYPE)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def packed_cache(model, recipe, batch, tokens):
    """A cache for transformers that holds random tokens."""
    past = kvpack.hf.PackedCache(recipe)
    plan = model.model.layers[0].self_attn._kvpack_plan
    for first in range(0, tokens, PART):
        part = min(PART, tokens - first)
        shape = torch.empty(batch, HEADS, part, CHANNELS, device="meta")
        past.held.begin(plan, shape[:, :KV_HEADS], shape.to("meta"), None, device="cuda:0")
        for layer in range(LAYERS):
            past.held.step.store(layer, rows(batch * part, KV_HEADS), rows(batch * part, KV_HEADS))
        past.held.step.commit()
        past.held.step, past.held.seen = None, past.held.seen + part
        if first == 0:
            past.held.cache.reserve([(row, tokens + 256 - part, "chunk") for row in range(batch)])
    past.held.cache.trim()
    return past


def dense_cache(past, batch, tokens):
    """Fills a cache of transformers with random tokens."""
    for layer in range(LAYERS):
        of = [torch.randn(batch, KV_HEADS, tokens, CHANNELS, device="cuda", dtype=DTYPE) for _ in range(2)]
        past.update(*of, layer)
    return past


def cache_of(model, kind, batch, tokens):
    if kind == "DynamicCache":
        return dense_cache(DynamicCache(), batch, tokens)
    if kind in QUANTIZED:
        return dense_cache(QuantizedCache(kind, model.config, nbits=4), batch, tokens)
    return packed_cache(model, kind, batch, tokens)


def end_to_end(model, batch, tokens, steps, kind, argument):
    """Decoded tokens in a second, with the model's other kernels."""
    torch.cuda.empty_cache()
    before = free_bytes()
    dense = kind == "DynamicCache" or kind in QUANTIZED
    recipe = kind.removeprefix(GRAPHS).removeprefix(COMPILED)
    kvpack.hf.disable(model) if dense else kvpack.hf.enable(model, recipe)
    if recipe != kind:
        kvpack.hf.use_graphs(model, compiler=torch.compile if kind.startswith(COMPILED) else None)
    past = cache_of(model, recipe, batch, tokens)
    torch.cuda.empty_cache()  # of what filled the cache
    held = before - free_bytes()
    ids, times, least = torch.ones(batch, 1, dtype=torch.long, device="cuda"), [], free_bytes()
    with torch.no_grad():
        for _ in range(steps + 4):
            began = time.perf_counter()
            logits = model(ids, use_cache=True, **{argument: past}).logits
            ids = logits[:, -1:].argmax(-1)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
            least = min(least, free_bytes())
    seconds = statistics.median(times[4:])
    name = {"DynamicCache": "DynamicCache + SDPA bf16", **{of: f"QuantizedCache {of} 4 bits" for of in QUANTIZED}}
    print(f"model | {batch} × {tokens} | {name.get(kind, kind)} | {batch / seconds:.1f} tokens/s | "
          f"{1e3 * seconds:.2f} ms a step | cache {held / 2**30:.2f} GiB, with the work of a step "
          f"{(before - least) / 2**30:.2f} GiB", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["host", "attention", "model"])
    parser.add_argument("--sizes", default="1x8192,1x32768,8x32768,1x131072", help="batch x tokens, with commas")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--caches", default=f"DynamicCache,saw-int4,{GRAPHS}saw-int4,{COMPILED}saw-int4",
                        help=f"of the model; also {', '.join(QUANTIZED)}")
    parser.add_argument("--no-cudnn", action="store_true", help="let SDPA use no cuDNN kernels")
    given = parser.parse_args()
    torch.backends.cuda.enable_cudnn_sdp(not given.no_cudnn)
    sizes = [tuple(map(int, size.split("x"))) for size in given.sizes.split(",")]
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, transformers {transformers.__version__}, "
          f"kvpack {kvpack.__version__}", flush=True)
    with torch.no_grad():
        if "host" in given.parts:
            overhead()
        for size in sizes if "attention" in given.parts else []:
            attention(*size, given.steps)
        if "model" in given.parts:
            import inspect
            model = model_of_8b()
            names = inspect.signature(model.model.forward).parameters
            argument = "past_key_values" if "past_key_values" in names else "cache"
            for batch, tokens in sizes:
                for kind in given.caches.split(","):
                    steps = 5 if kind in QUANTIZED else given.steps
                    try:
                        end_to_end(model, batch, tokens, steps, kind, argument)
                    except Exception as failed:
                        print(f"model | {batch} × {tokens} | {kind} | {str(failed)[:200]}", flush=True)
                    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
