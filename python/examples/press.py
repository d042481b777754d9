"""Keeps the tokens of a prompt that scores choose, packed: a policy of one's own. Runs on the CPU with NumPy alone.

    python examples/press.py

The scores are the negated norms of keys, as of "A Simple and Effective L2 Norm-Based Strategy" (arXiv 2406.11430).
Any other scores ``[layers, kv_heads, tokens]`` will do, those of kvpress among them.
"""

import numpy as np

import kvpack

LAYERS, HEADS, KV_HEADS, CHANNELS, TOKENS = 2, 8, 2, 64, 600


def main():
    random = np.random.default_rng(1)
    rows = lambda tokens, heads: random.standard_normal((tokens, heads, CHANNELS)).astype(np.float32)
    layers = [(rows(TOKENS, KV_HEADS), rows(TOKENS, KV_HEADS)) for _ in range(LAYERS)]
    # Keys of some tokens matter: they have small norms, and queries look for them.
    for keys, _ in layers:
        keys[::5] *= 0.5

    scores = np.stack([-np.linalg.norm(keys, axis=2).T for keys, _ in layers])
    scores[:, :, :4] = np.inf  # the first tokens stay,
    scores[:, :, -32:] = np.inf  # and the newest
    kept = kvpack.select(scores, 0.25)

    cache = kvpack.Cache(layers=LAYERS, query_heads=HEADS, kv_heads=KV_HEADS, head_dim=CHANNELS, recipe="saw-int4")
    cache.keep(0, layers, kept)
    with cache.begin([0]) as step:  # decoding goes on at position 600
        for layer in range(LAYERS):
            outputs = step.store_attend(layer, rows(1, KV_HEADS), rows(1, KV_HEADS), rows(1, HEADS))

    memory = cache.memory()
    share = cache.tokens(0, 0) / cache.length(0)
    print(f"{cache.tokens(0, 0)} of {cache.length(0)} tokens at {memory['bits_per_element']:.2f} bits an element")
    assert np.isfinite(outputs).all() and cache.length(0) == TOKENS + 1 and share < 0.26
    assert {0, 1, 2, 3, TOKENS - 1} <= set(kept[0][0])


if __name__ == "__main__":
    main()
