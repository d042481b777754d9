"""A server in small: requests join and leave a batch, share a prompt, and wait on the host when memory is short.

    python examples/serving.py

Runs on the CPU with NumPy alone. Random rows stand for what a model computes.
"""

import collections

import numpy as np

import kvpack

LAYERS, HEADS, KV_HEADS, CHANNELS = 2, 8, 2, 64
SLOTS, REQUESTS, SYSTEM, OUTPUT = 4, 8, 200, 60


class Model:
    """Random keys, values and queries."""

    def __init__(self):
        self.random = np.random.default_rng(3)

    def rows(self, tokens, heads):
        return self.random.standard_normal((tokens, heads, CHANNELS), dtype=np.float32)

    def step(self, cache, runs):
        tokens = sum(run[1] if isinstance(run, tuple) else 1 for run in runs)
        with cache.begin(runs) as step:
            for layer in range(cache.layers):
                keys, values = self.rows(tokens, KV_HEADS), self.rows(tokens, KV_HEADS)
                step.store_attend(layer, keys, values, self.rows(tokens, HEADS))


def main():
    model = Model()
    # Slot 0 holds the prompt that all requests begin with.
    cache = kvpack.Cache(layers=LAYERS, query_heads=HEADS, kv_heads=KV_HEADS, head_dim=CHANNELS, recipe="int8",
                         sequences=SLOTS + 1, budget=640_000)
    model.step(cache, [(0, SYSTEM)])
    waiting = collections.deque((request, None) for request in range(REQUESTS))
    running, left, swaps, done, short = {}, dict.fromkeys(range(REQUESTS), OUTPUT), 0, [], False
    while waiting or running:
        free = [slot for slot in range(1, SLOTS + 1) if slot not in running]
        while waiting and free and not short:
            request, swapped = waiting[0]
            try:
                if swapped is None:
                    cache.fork(0, free[0])  # shares the pages of the prompt
                else:
                    cache.swap_in(free[0], swapped)
            except kvpack.NoRoom:
                break
            running[free.pop(0)] = waiting.popleft()[0]
        try:
            model.step(cache, list(running))
        except kvpack.NoRoom:
            # The newest request waits on the host, bit for bit.
            slot, request = running.popitem()
            waiting.appendleft((request, cache.swap_out(slot)))
            swaps, short = swaps + 1, True  # until a request is done
            continue
        for slot, request in list(running.items()):
            left[request] -= 1
            if left[request] == 0:
                cache.clear(slot)
                del running[slot]
                done.append(request)
                short = False
    print(f"{len(done)} requests of {SYSTEM} + {OUTPUT} tokens in {SLOTS} slots, {swaps} times to the host")
    assert sorted(done) == list(range(REQUESTS)) and swaps > 0


if __name__ == "__main__":
    main()
