"""The cache against attention in float64 over what it holds."""

import os
import sys
import threading
import time

import numpy as np
import pytest
from reference import attention, error, held

import kvpack

LAYERS, HEADS, KV_HEADS, CHANNELS = 2, 4, 2, 64


def normal(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def new(recipe="f16", **options):
    given = dict(layers=LAYERS, query_heads=HEADS, kv_heads=KV_HEADS, head_dim=CHANNELS, recipe=recipe, sequences=3)
    return kvpack.Cache(**{**given, **options})


def fill(cache, runs, seed=0, dtype=np.float32):
    """A step with random rows; returns queries and outputs of every layer."""
    rows = sum(run[1] if isinstance(run, tuple) else 1 for run in runs)
    done = []
    with cache.begin(runs) as step:
        for layer in range(LAYERS):
            k, v, q = (normal([seed, layer, i], rows, heads, CHANNELS, dtype=dtype) for i, heads in
                       enumerate([KV_HEADS, KV_HEADS, HEADS]))
            step.store(layer, k, v)
            done.append((q, step.attend(layer, q)))
    return done


@pytest.mark.parametrize("recipe", kvpack.recipes())
def test_every_recipe_attends_to_what_it_holds(recipe):
    cache = new(recipe)
    fill(cache, [(0, 200), (1, 3)])
    for seed in range(1, 4):
        fill(cache, [0, 1], seed)
    assert [cache.length(sequence) for sequence in range(3)] == [203, 6, 0]
    step = cache.begin_attend([(0, 1), (1, 1)])
    for layer in range(LAYERS):
        q = normal([9, layer], 2, HEADS, CHANNELS)
        out, (states, lse) = step.attend(layer, q), step.attend_states(layer, q)
        for sequence in range(2):
            keys, values, _ = held(cache, layer, sequence)
            row = slice(sequence, sequence + 1)
            wanted, wanted_lse = attention(q[row], keys, values, np.ones((1, keys.shape[1]), bool))
            assert error(out[row], wanted) < 1e-5
            assert error(states[row], wanted) < 1e-5
            assert error(lse[row], wanted_lse) < 1e-5
    step.abandon()
    memory = cache.memory()
    assert memory["in_use_bytes"] <= memory["allocated_bytes"]
    assert sum(store["tokens"] for store in memory["stores"]) == 209


def test_packed_prompts_take_less():
    caches = {recipe: new(recipe) for recipe in ["f16", "int8", "kivi:2"]}
    for cache in caches.values():
        fill(cache, [(0, 512)])
        cache.pack_windows(0)
    bits = [cache.memory()["bits_per_element"] for cache in caches.values()]
    assert bits[0] == 16 and bits[0] > bits[1] > bits[2]


@pytest.mark.parametrize("dtype, most", [(np.float32, 1e-3), (np.float16, 2e-3)])
def test_prompts_are_causal_in_f16(dtype, most):
    rows = 150
    done = fill(new("f16"), [(0, rows)], dtype=dtype)
    for layer, (q, out) in enumerate(done):
        assert out.dtype == dtype and out.shape == q.shape
        k, v = (normal([0, layer, i], rows, KV_HEADS, CHANNELS, dtype=dtype).transpose(1, 0, 2) for i in range(2))
        wanted, _ = attention(q, k.astype(np.float64), v.astype(np.float64), np.tri(rows, dtype=bool))
        assert error(out, wanted) < most


def test_layers_score_and_see_as_they_are_told():
    sinks = [None, [0.5, -1.0, 2.0, 0.0]]
    cache = new("f16", scale=0.1, soft_cap=2.0, windows=[None, 7], sinks=sinks)
    rows = 40
    for layer, (q, out) in enumerate(fill(cache, [(0, rows)])):
        k, v, _ = held(cache, layer, 0)
        sees = np.tri(rows, dtype=bool)
        if layer == 1:
            sees &= ~np.tri(rows, k=-7, dtype=bool)
        wanted, _ = attention(q, k, v, sees, 0.1, 2.0, sinks[layer])
        assert error(out, wanted) < 1e-5


def test_forks_share_and_differ():
    cache = new("int8")
    fill(cache, [(0, 130)])
    before = cache.memory()["in_use_bytes"]
    cache.fork(0, 1)
    assert cache.memory()["in_use_bytes"] == before and cache.length(1) == 130
    fill(cache, [1], 5)
    assert (cache.length(0), cache.length(1)) == (130, 131)
    first, second = held(cache, 0, 0)[0], held(cache, 0, 1)[0]
    np.testing.assert_array_equal(first, second[:, :130])
    with pytest.raises(kvpack.Error, match="sequence"):
        cache.fork(0, 1)


def test_truncated_tokens_are_gone():
    cache = new("int8")
    fill(cache, [(0, 130)])
    kept = held(cache, 1, 0)[0][:, :100]
    cache.truncate(0, 100)
    np.testing.assert_array_equal(held(cache, 1, 0)[0], kept)
    with pytest.raises(kvpack.Error):
        cache.truncate(0, 101)
    cache.clear(0)
    assert cache.length(0) == 0


def test_a_truncation_can_be_asked_for_beforehand():
    cache = new("f16", windows=[None, 16])
    fill(cache, [(0, 300)])
    fill(cache, [0], 1)
    for length, text in ((302, "it holds 301"), (100, "sliding window of 15 positions")):
        for call in (cache.check_truncate, cache.truncate):
            with pytest.raises(kvpack.Error, match=text):
                call(0, length)
    cache.check_truncate(0, 200)
    with pytest.raises(kvpack.Error, match="sequence 3"):
        cache.check_truncate(3, 0)
    step = cache.begin([0])
    with pytest.raises(kvpack.Error, match="a step is open"):
        cache.check_truncate(0, 0)
    step.abandon()
    assert cache.length(0) == 301
    cache.truncate(0, 200)
    assert cache.length(0) == 200


@pytest.mark.parametrize("recipe", ["f16", "kivi:2", "saw-int4"])
def test_swapped_sequences_come_back_bit_for_bit(recipe):
    cache = new(recipe)
    fill(cache, [(0, 300)])
    before = held(cache, 1, 0)
    swapped = cache.swap_out(0)
    assert cache.length(0) == 0 and len(swapped) == 300 and swapped.bytes > 0
    cache.swap_in(2, swapped)
    for x, y in zip(held(cache, 1, 2), before):
        np.testing.assert_array_equal(x, y)
    with pytest.raises(kvpack.Error):
        cache.swap_in(2, swapped)
    with pytest.raises(kvpack.Error):
        new("int8", layers=1).swap_in(0, swapped)


def test_policies_keep_what_they_return():
    cache = new("h2o:0.25/saw-int4")
    tokens = 120
    rows = cache.query_rows(tokens)
    layers = [(normal([layer, 0], tokens, KV_HEADS, CHANNELS), normal([layer, 1], tokens, KV_HEADS, CHANNELS),
               normal([layer, 2], tokens, HEADS, CHANNELS)[rows]) for layer in range(LAYERS)]
    kept = cache.compress(0, layers)
    assert len(kept) == LAYERS and all(len(of_head) == 30 for of_layer in kept for of_head in of_layer)
    assert cache.length(0) == tokens and cache.tokens(1, 0) == 30
    with pytest.raises(kvpack.Error, match="evicts nothing"):
        new("saw-int4").compress(0, layers)


def test_callers_keep_tokens_of_their_own():
    cache = new("f16")
    layers = [(normal([layer, 0], 50, KV_HEADS, CHANNELS, dtype=np.float16),
               normal([layer, 1], 50, KV_HEADS, CHANNELS, dtype=np.float16)) for layer in range(LAYERS)]
    kept = [[[0, 7, 49], [1, 2, 3]]] * LAYERS
    cache.keep(0, layers, kept)
    keys = held(cache, 1, 0)[0]
    for head in range(KV_HEADS):
        np.testing.assert_array_equal(keys[head], layers[1][0][kept[1][head], head].astype(np.float64))
    with pytest.raises(kvpack.Error):
        cache.keep(1, layers, [[[0, 50], [0, 1]]] * LAYERS)


def test_steps_end_once():
    cache = new("f16")
    fill(cache, [(0, 5)])
    step = cache.begin([0])
    with pytest.raises(kvpack.Error, match="a step is open"):
        cache.begin([0])
    with pytest.raises(kvpack.Error, match="a step is open"):
        cache.truncate(0, 1)
    with pytest.raises(kvpack.Error, match="layer 0 has not stored"):
        step.commit()
    step.abandon()
    for call in (step.commit, lambda: step.store(0, normal(0, 1, 2, 64), normal(0, 1, 2, 64))):
        with pytest.raises(kvpack.Error, match="committed or abandoned"):
            call()
    assert cache.length(0) == 5
    # A step may end before its block does.
    with cache.begin([0]) as step:
        for layer in range(LAYERS):
            step.store(layer, normal(0, 1, 2, 64), normal(0, 1, 2, 64))
        step.commit()
    assert cache.length(0) == 6
    with cache.begin([0]) as step:
        step.abandon()
    cache.truncate(0, 5)
    # An exception inside a step rolls it back.
    with pytest.raises(ZeroDivisionError), cache.begin([0]) as step:
        step.store(0, normal(0, 1, 2, 64), normal(0, 1, 2, 64))
        raise ZeroDivisionError
    assert cache.length(0) == 5
    # A step that was replaced does not touch its successor.
    later = cache.begin([0])
    step.abandon()
    with pytest.raises(kvpack.Error, match="a step is open"):
        cache.clear(0)
    later.abandon()


def test_tokens_that_are_not_stored_are_not_read():
    cache = new("f16")
    fill(cache, [(1, 100)])
    cache.clear(1)
    with cache.begin([(0, 3)]) as step:
        rows = normal(0, 3, KV_HEADS, CHANNELS)
        step.store(0, rows, rows)
        assert cache.dequantize(0, 0)[0]["tokens"] == 3 and cache.dequantize(1, 1) == []
        with pytest.raises(kvpack.Error, match="layer 1 has not stored"):
            cache.dequantize(1, 0)
        for layer in range(1, LAYERS):
            step.store(layer, rows, rows)
        np.testing.assert_array_equal(cache.dequantize(1, 0)[0]["keys"][0], rows[:, 0].astype(np.float16))


def test_a_step_that_attends_stores_nothing():
    cache = new("f16")
    fill(cache, [(0, 5)])
    k, v, q = (normal([1, i], 1, heads, CHANNELS) for i, heads in enumerate((KV_HEADS, KV_HEADS, HEADS)))
    with cache.begin_attend([(0, 1)]) as step:
        for call in (lambda: step.store(0, k, v), lambda: step.store_attend(0, k, v, q)):
            with pytest.raises(kvpack.Error, match="no such step is open"):
                call()
        outputs = [step.attend(layer, q) for layer in range(LAYERS)]
    assert cache.length(0) == 5
    for layer, out in enumerate(outputs):
        keys, values, _ = held(cache, layer, 0)
        assert error(out, attention(q, keys, values, np.ones((1, 5), bool))[0]) < 1e-5


def test_a_budget_is_kept():
    cache = new("f16", budget=4 * 2 * 128 * KV_HEADS * CHANNELS * 2)
    fill(cache, [(0, 128)])
    with pytest.raises(kvpack.NoRoom):
        cache.begin([(1, 1000)])
    assert cache.length(1) == 0
    fill(cache, [(1, 100)])


def test_elements_that_are_not_finite_are_flagged():
    cache = new("f16")
    bad = normal(0, 1, KV_HEADS, CHANNELS)
    bad[0, 1, 3] = np.nan
    with cache.begin([0]) as step:
        for layer in range(LAYERS):
            step.store(layer, bad if layer else np.zeros_like(bad), np.zeros_like(bad))
    assert len(cache.non_finite()) == 1


@pytest.mark.parametrize("options, text", [
    (dict(recipe="kivi:9"), "recipe 'kivi:9'"),
    (dict(head_dim=63), "head_dim 63"),
    (dict(query_heads=3), "query heads"),
    (dict(layers=0), "at least one layer"),
    (dict(layers=10**15), "layers"),
    (dict(sequences=0), "at least one sequence"),
    (dict(sequences=10**15), "sequences"),
    (dict(windows=[3]), "for 2 layers"),
    (dict(windows=[None, 1]), "2 or more"),
    (dict(sinks=[None, [1.0]]), "sink"),
    (dict(soft_cap=-1.0), "soft cap"),
    (dict(scale=float("nan")), "scale"),
    (dict(device="tpu"), "device 'tpu'"),
    (dict(recipe="int8+layers=7:f16"), "layer"),
])
def test_caches_that_cannot_be(options, text):
    with pytest.raises(kvpack.Error, match=text):
        new(**options)


@pytest.mark.parametrize("runs", [[], [7], [0, 0], [(0, 0)], [(0, 2**40)], [(2**63, 1)]])
def test_runs_that_cannot_be(runs):
    cache = new()
    with pytest.raises(kvpack.Error):
        cache.begin(runs)
    fill(cache, [0])


def test_runs_of_other_types():
    for runs in (["0"], [(0, 1, "draft")], [-1], [(0, 1, 2, 3)], [None]):
        with pytest.raises((TypeError, OverflowError)):
            new().begin(runs)


def test_threads_compute_side_by_side():
    caches = [new("kivi:2") for _ in range(4)]
    failed = []

    def work(cache, seed):
        try:
            fill(cache, [(0, 400)], seed)
            for step in range(20):
                fill(cache, [0], [seed, step])
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(cache, seed)) for seed, cache in enumerate(caches)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not failed
    for seed, cache in enumerate(caches):
        alone = new("kivi:2")
        work(alone, seed)
        np.testing.assert_array_equal(held(cache, 1, 0)[0], held(alone, 1, 0)[0])


def test_threads_on_one_cache_get_errors_or_their_turn():
    cache = new("f16", sequences=8)
    outcomes = []

    def work(sequence):
        for _ in range(50):
            try:
                fill(cache, [sequence])
                outcomes.append("done")
            except kvpack.Error as error:
                assert "a step is open" in str(error)
                outcomes.append("refused")

    threads = [threading.Thread(target=work, args=(sequence,)) for sequence in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(outcomes) == 400 and "done" in outcomes
    assert sum(cache.length(sequence) for sequence in range(8)) == outcomes.count("done")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system forks no processes")
def test_forked_processes_work_on():
    """As workers of PyTorch's DataLoader: with the parent's cache and a new one, while the parent works on."""
    cache = new("kivi:2")
    fill(cache, [(0, 300)])
    packed = kvpack.quantize(normal(0, 200, 2, 64), normal(1, 200, 2, 64), "kivi:2")
    child = os.fork()
    if child == 0:
        status = 2
        try:
            fill(cache, [(0, 200), 1], 3)
            fill(new("saw-int4"), [(0, 200)], 3)
            kvpack.attend(packed, normal(2, 5, 2, 64))
            status = 0 if cache.length(0) == 500 else 1
        finally:
            os._exit(status)
    fill(cache, [0])
    for _ in range(600):
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            break
        time.sleep(0.1)
    else:
        os.kill(child, 9)
        pytest.fail("the child hangs")
    assert os.waitstatus_to_exitcode(status) == 0
    assert cache.length(0) == 301


def test_cuda_says_what_is_missing():
    # Without a driver, or in a wheel without CUDA, the text says so. On a machine with a card this test says nothing.
    try:
        new(device="cuda:0")
    except kvpack.Error as error:
        assert "CUDA" in str(error) or "cuda" in str(error)
    else:
        pytest.skip("NOT RUN: this machine has a CUDA device")


def test_a_layer_in_one_call_is_as_in_two():
    one, two = new("kivi:4"), new("kivi:4")
    for tokens in (150, 1):
        with one.begin([(0, tokens)]) as step, two.begin([(0, tokens)]) as other:
            assert step.graph is None and step.bound_anew
            with pytest.raises(kvpack.Error, match="graph"):
                step.replayed()
            for layer in range(LAYERS):
                k, v, q = (normal([layer, i], tokens, heads, CHANNELS) for i, heads in enumerate((2, 2, 4)))
                other.store(layer, k, v)
                out = np.empty_like(q)
                assert step.store_attend(layer, k, v, q, out=out) is out
                np.testing.assert_array_equal(out, other.attend(layer, q))
    with one.begin([0]) as step:
        with pytest.raises(kvpack.TensorError, match="the keys have 1"):
            step.store_attend(0, k, v[:0], q)
        with pytest.raises(kvpack.TensorError, match="queries: they have 2 rows; the keys have 1"):
            step.store_attend(0, k, v, normal(0, 2, HEADS, CHANNELS))
        with pytest.raises(kvpack.Error, match="layer 0 has not stored"):
            step.commit()
        for layer in range(LAYERS):
            step.store(layer, k, v)


def test_room_is_allocated_and_given_back():
    cache = new("saw-int4")
    cache.prepare(16)
    cache.reserve([(0, 1000, "chunk")])
    reserved = cache.memory()["allocated_bytes"]
    fill(cache, [(0, 1000, "chunk")])
    assert cache.memory()["allocated_bytes"] == reserved
    fill(cache, [(1, 500)])  # through f16 pages
    assert cache.trim() > 0 and cache.trim() == 0
    with pytest.raises(kvpack.NoRoom):
        new("f16", budget=1000).reserve([(0, 1000)])
    with pytest.raises(kvpack.Error):
        cache.reserve([(9, 1)])


def test_scores_choose_tokens():
    scores = np.array([[[3.0, 1.0, 2.0, 3.0], [0.0, 0.0, 0.0, np.inf]]])
    assert kvpack.select(scores, 2) == [[[0, 3], [0, 3]]] and kvpack.select(scores, 0.25) == [[[0], [3]]]
    for unsigned in (np.uint8, np.uint32, np.uint64):
        assert kvpack.select(np.array([[[0, 5, 3]]], unsigned), 2) == [[[1, 2]]]
    layers = [(normal(0, 4, 2, 64), normal(1, 4, 2, 64))]
    cache = new(layers=1)
    cache.keep(0, layers, kvpack.select(scores, 3))
    np.testing.assert_array_equal(held(cache, 0, 0)[0][0], layers[0][0][[0, 2, 3], 0].astype(np.float16))
    assert kvpack.select(scores, 1.0) == kvpack.select(scores, 4) == [[[0, 1, 2, 3]] * 2]
    stay = np.where(np.arange(100) % 2 == 0, np.inf, 0.0).reshape(1, 1, 100)
    assert kvpack.select(stay, 0.5) == [[list(range(0, 100, 2))]]
    with pytest.raises(ValueError, match="49 tokens; a head has 50"):
        kvpack.select(stay, 49)
    for wrong, keep in ((scores[0], 1), (scores[:, :, :0], 1), (scores * np.nan, 1), (scores, 5), (scores, 0),
                        (scores, 1.5), (scores, True), (scores, 0.0)):
        with pytest.raises((kvpack.TensorError, ValueError)):
            kvpack.select(wrong, keep)


def test_nvrtc_is_found_where_wheels_bring_it(tmp_path, monkeypatch):
    from kvpack import _nvrtc

    assert all(file.exists() for file in _nvrtc.candidates())
    for name in ("cuda_nvrtc/lib/libnvrtc.so.12", "cu13/lib/libnvrtc.so.13", "cu13/lib/libnvrtc-builtins.so.13.0",
                 "cu13/lib/libnvrtc.alt.so.13"):
        file = tmp_path / "nvidia" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    monkeypatch.setattr(_nvrtc, "_loaded", [])
    found = [file.name for file in _nvrtc.candidates() if tmp_path in file.parents]  # PyTorch may have brought another
    assert found == ["libnvrtc.so.13", "libnvrtc.so.12"]
    monkeypatch.setattr(_nvrtc, "candidates", lambda: [tmp_path / "nvidia" / "cu13" / "lib" / "libnvrtc.so.13"])
    assert _nvrtc.load() is None  # it is no library
