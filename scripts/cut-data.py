#!/usr/bin/env python3
"""Cuts a dump of keys, values and queries (safetensors) down to a few layers and a part of its tokens.

    scripts/cut-data.py IN.safetensors OUT.safetensors --layers 0,15,29 --first 128 --recent 1024

The cut keeps the first tokens of the prompt and the most recent tokens before the queries. It keeps the first because
most heads put much of their weight on token 0 (an attention sink), and quantised keys fail there first. It keeps the
recent because without them that sink would take nearly everything, and attention over the cut would be easier than
attention over the whole. The queries are unchanged. All of them come from later positions than the kept keys, so no
query looks at its own future, and no causal mask is needed.

The script needs Python 3.8 and no packages.
"""

import argparse
import json
import math
import struct
import sys

DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


def read(path):
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        data = file.read()
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = (entry["dtype"], entry["shape"], data[begin:end])
    return metadata, tensors


def write(path, metadata, tensors):
    header, offset = {"__metadata__": metadata}, 0
    for name, (dtype, shape, data) in tensors.items():
        if len(data) != math.prod(shape) * DTYPE_BYTES[dtype]:
            raise ValueError(f"{name}: {len(data)} bytes do not hold {dtype} {shape}")
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors.values():
            file.write(data)


def take_tokens(tensor, spans):
    """The tokens in these spans (begin, end) of a [heads, tokens, head_dim] tensor."""
    dtype, (heads, held, head_dim), data = tensor
    row = head_dim * DTYPE_BYTES[dtype]
    kept = b"".join(
        data[(head * held + begin) * row : (head * held + end) * row] for head in range(heads) for begin, end in spans
    )
    return dtype, [heads, sum(end - begin for begin, end in spans), head_dim], kept


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--layers", default="0,15,29", help="layers to keep, separated by commas")
    parser.add_argument("--first", type=int, default=128, help="tokens to keep from the start of the prompt")
    parser.add_argument("--recent", type=int, default=1024, help="tokens to keep from just before the queries")
    parser.add_argument("--decode", type=int, default=1, help="queries after the prompt to keep")
    parser.add_argument("--model", help="what the metadata call the model, where the dump has another name for it")
    parser.add_argument("--rope", default="theta 1e5, pairs 2i,2i+1", help="the model's rotary embedding, for the metadata")
    options = parser.parse_args()

    metadata, tensors = read(options.source)
    layers = [int(layer) for layer in options.layers.split(",")]
    prompt = int(metadata.get("tokens", tensors[f"layer{layers[0]}.key"][1][1]))
    window = tensors[f"layer{layers[0]}.query_prompt"][1][1]
    queries_begin = prompt - window
    if options.first < 0 or options.recent < 0 or options.first + options.recent > queries_begin:
        sys.exit(f"only {queries_begin} tokens come before the queries")
    spans = [(0, options.first), (queries_begin - options.recent, queries_begin)]

    kept = {}
    for layer in layers:
        for part in ("key", "value"):
            kept[f"layer{layer}.{part}"] = take_tokens(tensors[f"layer{layer}.{part}"], spans)
        kept[f"layer{layer}.query_prompt"] = tensors[f"layer{layer}.query_prompt"]
        kept[f"layer{layer}.query_decode"] = take_tokens(tensors[f"layer{layer}.query_decode"], [(0, options.decode)])

    kv_heads, tokens, head_dim = kept[f"layer{layers[0]}.key"][1]
    query_heads = kept[f"layer{layers[0]}.query_prompt"][1][0]
    positions = ", ".join(f"{begin}-{end - 1}" for begin, end in spans if end > begin)
    if options.model:
        metadata["model"] = options.model
    metadata = dict(
        metadata,
        layout=(
            f"key,value [kv_heads={kv_heads}, tokens={tokens}, head_dim={head_dim}];"
            f" query_prompt [q_heads={query_heads}, last {window} prompt tokens, {head_dim}];"
            f" query_decode [{query_heads},{options.decode},{head_dim}]; keys and queries after RoPE ({options.rope}),"
            f" scores are q.k/sqrt({head_dim})"
        ),
        layers=json.dumps(layers),
        tokens=str(tokens),
        prompt_tokens=str(prompt),
        key_positions=positions,
        query_positions=f"{queries_begin}-{prompt - 1} (query_prompt), then {prompt} and on (query_decode)",
        mask="none: every query comes later than every key",
    )
    write(options.target, metadata, kept)


if __name__ == "__main__":
    main()
