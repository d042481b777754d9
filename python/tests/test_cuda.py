"""Every call on tensors of PyTorch on a card, against float64. Needs an NVIDIA GPU, PyTorch and a wheel with the
feature cuda, by hand: ``python -m pytest test_cuda.py``."""

import ctypes
import gc
import os
import threading
import time

import numpy as np
import pytest
from reference import attention, error, held

import kvpack

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

LAYERS, KV_HEADS, HEADS, CHANNELS = 3, 2, 8, 64
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NOISE = {torch.float32: 2e-3, torch.float16: 2e-3, torch.bfloat16: 6e-3}


def new_cache(recipe="f16", sequences=3, **options):
    return kvpack.Cache(layers=LAYERS, query_heads=HEADS, kv_heads=KV_HEADS, head_dim=CHANNELS, recipe=recipe,
                        sequences=sequences, **{"device": "cuda:0", **options})


def rows(tokens, heads=KV_HEADS, dtype=torch.float16, seed=0):
    generator = torch.Generator("cuda").manual_seed(1000 * seed + 10 * tokens + heads)
    return torch.randn(tokens, heads, CHANNELS, device="cuda", generator=generator).to(dtype)


def numpy(tensor):
    return tensor.detach().double().cpu().numpy()


def run_step(cache, runs, tokens, dtype=torch.float16, seed=0, call="both"):
    """A step of random rows. Returns queries and outputs of every layer."""
    found = []
    with cache.begin(runs) as step:
        for layer in range(LAYERS):
            of = seed * LAYERS + layer
            keys, values = rows(tokens, dtype=dtype, seed=3 * of), rows(tokens, dtype=dtype, seed=3 * of + 1)
            queries = rows(tokens, HEADS, dtype, 3 * of + 2)
            if call == "both":
                outputs = step.store_attend(layer, keys, values, queries)
            else:
                step.store(layer, keys, values)
                outputs = step.attend(layer, queries)
            assert outputs.dtype == dtype and outputs.shape == queries.shape and outputs.is_cuda
            found.append((queries, outputs))
    return found


def check(cache, layer, sequence, queries, outputs, most, **options):
    """Outputs of the newest tokens of a sequence, against what the cache holds."""
    keys, values, positions = held(cache, layer, sequence)
    newest = cache.length(sequence) - queries.shape[0] + np.arange(queries.shape[0])
    wanted, _ = attention(numpy(queries), keys, values, positions[None, :] <= newest[:, None], **options)
    assert error(numpy(outputs), wanted) < most


# --- steps --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["both", "apart"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("recipe", ["f16", "int8", "saw-int4", "turboquant-renormalized:4", "kivi:4+window=128"])
def test_decoding_is_attention_to_what_is_held(recipe, dtype, call):
    cache = new_cache(recipe)
    run_step(cache, [(0, 300)], 300, dtype, 1)
    run_step(cache, [(1, 33)], 33, dtype, 2)
    for token in range(3):
        found = run_step(cache, [0, 1, 2], 3, dtype, 3 + token, call)
    for layer, (queries, outputs) in enumerate(found):
        for sequence in range(3):
            check(cache, layer, sequence, queries[sequence:sequence + 1], outputs[sequence:sequence + 1], NOISE[dtype])
    assert [cache.length(sequence) for sequence in range(3)] == [303, 36, 3]


@pytest.mark.parametrize("recipe", ["f16", "int8", "saw-int4", "turboquant-renormalized:4", "turboquant:3",
                                    "saw-int4+sink=128", "turboquant-renormalized:4+centre"])
def test_one_call_stores_what_two_store(recipe):
    """Bit for bit, over the ends of tiles, with sequences that share a tile until then, in one or several blocks."""
    one, two = new_cache(recipe, 6), new_cache(recipe, 6)
    for cache in (one, two):
        run_step(cache, [(0, 250)], 250, seed=1)
        run_step(cache, [(1, 5000)], 5000, seed=2)
        run_step(cache, [(2, 7)], 7, seed=3)
        for source in range(3):
            cache.fork(source, 3 + source)
    for turn in range(12):
        runs = list(range(6)) if turn % 3 else [1, 4, 0]
        found = [run_step(cache, runs, len(runs), torch.bfloat16, 4 + turn, call)
                 for cache, call in ((one, "both"), (two, "apart"))]
        for (_, mine), (_, theirs) in zip(*found):
            torch.testing.assert_close(mine.float(), theirs.float(), atol=1e-2, rtol=1e-2)
    for layer in range(LAYERS):
        for sequence in range(6):
            for mine, theirs in zip(held(one, layer, sequence), held(two, layer, sequence)):
                np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("tokens", [1, 33, 200, 700])
def test_prompts_are_causal(tokens):
    cache = new_cache()
    for layer, (queries, outputs) in enumerate(run_step(cache, [(0, tokens)], tokens)):
        check(cache, layer, 0, queries, outputs, 2e-3)


def test_scores_are_as_the_layers_say():
    sinks = [[0.5 * head for head in range(HEADS)], None, None]
    cache = new_cache(scale=0.2, soft_cap=5.0, sinks=sinks, windows=[None, 16, None])
    run_step(cache, [(0, 100)], 100)
    found = run_step(cache, [0], 1, seed=1)
    for layer, (queries, outputs) in enumerate(found):
        keys, values, positions = held(cache, layer, 0)
        sees = (positions > 100 - 16)[None] if layer == 1 else np.ones((1, len(positions)), bool)
        of = None if sinks[layer] is None else np.array(sinks[layer])
        wanted, _ = attention(numpy(queries), keys, values, sees, 0.2, 5.0, of)
        assert error(numpy(outputs), wanted) < 2e-3


def test_out_is_filled_and_returned():
    cache = new_cache()
    queries = rows(1, HEADS)
    with cache.begin([0]) as step:
        for layer in range(LAYERS):
            step.store(layer, rows(1), rows(1, seed=1))
            new = step.attend(layer, queries)
            for dtype in DTYPES:
                out = torch.full(queries.shape, float("nan"), dtype=dtype, device="cuda")
                assert step.attend(layer, queries, out=out) is out
                torch.testing.assert_close(out.float(), new.float(), atol=1e-2, rtol=1e-2)


def test_states_of_parts_are_those_of_all():
    cache = new_cache()
    run_step(cache, [(0, 150)], 150)
    queries = rows(2, HEADS)
    with cache.begin_attend([(0, 2)]) as step:
        outputs, lse = step.attend_states(1, queries)
        same = step.attend(1, queries)
    keys, values, positions = held(cache, 1, 0)
    sees = positions[None] <= np.array([148, 149])[:, None]
    wanted, wanted_lse = attention(numpy(queries), keys, values, sees)
    assert error(numpy(outputs), wanted) < 2e-3 and error(numpy(lse), wanted_lse) < 1e-3
    assert error(numpy(same), wanted) < 2e-3


def test_a_step_that_attends_stores_nothing():
    cache = new_cache()
    run_step(cache, [(0, 150)], 150)
    keys, values, queries = rows(1), rows(1, seed=1), rows(1, HEADS)
    with cache.begin_attend([(0, 1)]) as step:
        assert step.graph is not None, "its layers are not launched from tables: this tests nothing"
        for call in (lambda: step.store(0, keys, values), lambda: step.store_attend(0, keys, values, queries)):
            with pytest.raises(kvpack.Error, match="no such step is open"):
                call()
        outputs = [step.attend(layer, queries) for layer in range(LAYERS)]
    assert cache.length(0) == 150
    for layer, found in enumerate(outputs):
        check(cache, layer, 0, queries, found, 2e-3)


def test_states_inside_a_step_of_launches():
    cache = new_cache()
    with cache.begin([(0, 5)]) as step:
        for layer in range(LAYERS):
            step.store(layer, rows(5), rows(5, seed=1))
        outputs, lse = step.attend_states(0, rows(5, HEADS))
        assert torch.isfinite(outputs).all() and torch.isfinite(lse).all()
        torch.testing.assert_close(step.attend(0, rows(5, HEADS)).float(), outputs, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("recipe", ["f16", "saw-int4", "kivi:4+window=128"])
def test_sequences_fork_truncate_swap_and_clear(recipe):
    cache = new_cache(recipe)
    run_step(cache, [(0, 300)], 300)
    cache.pack_windows(0)
    cache.fork(0, 1)
    found = run_step(cache, [0, 1], 2, seed=1)
    for layer, (queries, outputs) in enumerate(found):
        check(cache, layer, 1, queries[1:], outputs[1:], 2e-3)
    before = [held(cache, layer, 1) for layer in range(LAYERS)]
    swapped = cache.swap_out(1)
    assert swapped.bytes > 0 and len(swapped) == 301 and cache.length(1) == 0
    cache.swap_in(2, swapped)
    for layer in range(LAYERS):
        for old, new in zip(before[layer], held(cache, layer, 2)):
            np.testing.assert_array_equal(old, new)
    cache.truncate(2, 280)
    found = run_step(cache, [2], 1, seed=2)
    for layer, (queries, outputs) in enumerate(found):
        check(cache, layer, 2, queries, outputs, 2e-3)
    cache.clear(2)
    assert cache.length(2) == 0 and cache.memory()["in_use_bytes"] > 0


def test_a_policy_keeps_a_part():
    cache = new_cache("h2o:0.25/f16")
    layers = []
    measured = cache.query_rows(256)
    for layer in range(LAYERS):
        queries = rows(256, HEADS, seed=layer)
        layers.append((rows(256, seed=10 + layer), rows(256, seed=20 + layer),
                       None if measured is None else queries[torch.tensor(measured, device="cuda")].contiguous()))
    kept = cache.compress(0, layers)
    assert len(kept) == LAYERS and len(kept[0]) == KV_HEADS and 0 < len(kept[0][0]) < 256
    assert cache.tokens(0, 0) == len(kept[0][0]) and cache.length(0) == 256
    wanted = numpy(layers[1][0])[kept[1][0], 0]
    np.testing.assert_allclose(cache.dequantize(1, 0)[0]["keys"][0], wanted, atol=1e-3)


def test_tokens_of_the_caller_are_kept():
    cache = new_cache("int8")
    layers = [(rows(200, seed=layer), rows(200, seed=9 + layer)) for layer in range(LAYERS)]
    kept = kvpack.select(torch.rand(LAYERS, KV_HEADS, 200, device="cuda"), 64)
    cache.keep(0, layers, kept)
    assert cache.tokens(2, 0) == 64
    found = cache.dequantize(2, 0)[0]["keys"][1]
    assert error(found, numpy(layers[2][0])[kept[2][1], 1]) < 0.02


def test_elements_that_are_not_finite_are_told():
    cache = new_cache()
    with cache.begin([0]) as step:
        keys = rows(1)
        keys[0, 1, 5] = float("nan")
        for layer in range(LAYERS):
            step.store(layer, keys, rows(1))
    assert len(cache.non_finite()) > 0


def test_a_budget_holds():
    cache = new_cache(budget=1 << 20)
    with pytest.raises(kvpack.NoRoom):
        run_step(cache, [(0, 5000)], 5000)
    run_step(cache, [(0, 100)], 100)
    assert cache.length(0) == 100 and cache.memory()["allocated_bytes"] <= 1 << 20


# --- tensors ------------------------------------------------------------------------------------------------------


def store_one(keys, values=None, cache=None):
    cache = cache or new_cache()
    with cache.begin([0]) as step:
        step.store(0, keys, keys if values is None else values)


@pytest.mark.parametrize("make, text", [
    (lambda: rows(1).cpu(), "keys: it lies on the CPU; this cache is on CUDA device 0"),
    (lambda: rows(1).cpu().numpy(), "keys: it lies on the CPU; this cache is on CUDA device 0"),
    (lambda: rows(1).double(), "torch.float64; use float32, float16 or bfloat16"),
    (lambda: rows(1).to(torch.int8), "torch.int8"),
    (lambda: rows(2), "tokens"),
    (lambda: rows(1, 3), r"\[1, 3, 64\]"),
    (lambda: rows(1)[0], r"\[2, 64\]"),
    (lambda: rows(1, KV_HEADS, torch.float32).requires_grad_(), "requires a gradient"),
    (lambda: torch.randn(1, CHANNELS, KV_HEADS, device="cuda").transpose(1, 2), "must be contiguous"),
    (lambda: torch.empty(1, KV_HEADS, CHANNELS, device="meta"), "meta"),
    (lambda: None, "has no __dlpack__"),
])
def test_wrong_tensors(make, text):
    with pytest.raises(kvpack.Error, match=text):
        store_one(make())


def test_a_cache_on_the_cpu_takes_no_tensor_of_a_card():
    with pytest.raises(kvpack.TensorError, match="it lies on CUDA device 0; this cache is on the CPU"):
        store_one(rows(1), cache=new_cache(device="cpu"))


def test_wrong_outputs():
    cache = new_cache()
    with cache.begin([0]) as step:
        for layer in range(LAYERS):
            step.store(layer, rows(1), rows(1))
        for out, text in ((torch.empty(1, HEADS, CHANNELS), "on the CPU"), (rows(2, HEADS), "that of the queries"),
                          (rows(1, HEADS).double(), "float64"),
                          (torch.empty(1, CHANNELS, HEADS, device="cuda").transpose(1, 2), "contiguous")):
            with pytest.raises(kvpack.TensorError, match=text):
                step.attend(0, rows(1, HEADS), out=out)
        with pytest.raises(kvpack.Error):
            step.attend(0, rows(2, HEADS))


@pytest.mark.parametrize("tokens", [1, 300])
def test_tensors_may_begin_at_any_element(tokens):
    def shifted(of):
        room = torch.empty(of.numel() + 1, dtype=of.dtype, device="cuda")
        part = room[1:].view(of.shape)
        part.copy_(of)
        return part

    whole, part = new_cache("saw-int4"), new_cache("saw-int4")
    keys, values, queries = rows(tokens), rows(tokens, seed=1), rows(tokens, HEADS)
    outputs = []
    for cache, as_given in ((whole, lambda x: x), (part, shifted)):
        with cache.begin([(0, tokens)]) as step:
            for layer in range(LAYERS):
                out = as_given(torch.zeros_like(queries))
                step.store_attend(layer, as_given(keys), as_given(values), as_given(queries), out=out)
            outputs.append(out)
    assert torch.equal(*outputs)


class Only:
    """A tensor of another library."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)


class Unordered(Only):
    """A tensor that is ordered with no stream."""

    def __dlpack__(self, **options):
        return super().__dlpack__(**{**options, "stream": -1})


def test_dlpack_alone():
    cache, same = new_cache(), new_cache()
    queries = rows(1, HEADS)
    with cache.begin([0]) as step, same.begin([0]) as other:
        for layer in range(LAYERS):
            out = torch.empty_like(queries)
            step.store(layer, Only(rows(1)), Only(rows(1, seed=1)))
            step.attend(layer, Only(queries), out=Only(out))
            assert torch.equal(out, other.store_attend(layer, rows(1), rows(1, seed=1), queries))


def test_new_tensors_are_those_of_pytorch():
    cache = new_cache()
    run_step(cache, [0], 1)
    with cache.begin_attend([(0, 1)]) as step, pytest.raises(kvpack.TensorError, match="PyTorch alone; pass tensors"):
        step.attend(0, Only(rows(1, HEADS)))


def test_outputs_that_overlap_a_part_of_what_is_read():
    cache = new_cache()
    room = rows(8, HEADS)
    queries, keys = room[1:3], rows(2)
    with cache.begin([(0, 2)]) as step:
        for layer in range(LAYERS):
            step.store(layer, keys, rows(2, seed=1))
        wanted = step.attend(0, queries)
        for out in (room[:2], room[2:4], room.view(torch.float32).flatten()[HEADS * CHANNELS // 2:][:wanted.numel()]):
            with pytest.raises(kvpack.TensorError, match="overlaps a part of the queries"):
                step.attend(0, queries, out=out.view(2, HEADS, CHANNELS))
        assert step.attend(0, queries, out=queries) is queries and torch.equal(queries, wanted)
    with cache.begin([0]) as step:
        for layer in range(LAYERS):
            if layer == 0:
                with pytest.raises(kvpack.TensorError, match="overlaps the keys or the values"):
                    step.store_attend(0, room[1:2, :KV_HEADS], rows(1), rows(1, HEADS), out=room[1:2])
            step.store(layer, rows(1), rows(1))


def context():
    found = ctypes.c_void_p()
    ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(found))
    return found.value


def pool_bytes():
    """What this process has allocated of the device's pool, where caches lie."""
    driver, pool, used = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
    assert driver.cuDeviceGetDefaultMemPool(ctypes.byref(pool), 0) == 0
    assert driver.cuMemPoolGetAttribute(pool, 7, ctypes.byref(used)) == 0  # CU_MEMPOOL_ATTR_USED_MEM_CURRENT
    return used.value


def test_threads_keep_their_device():
    found = []

    def work():
        found.append(context())
        cache = new_cache()
        found.append(context())
        cache.prepare()
        cache.reserve([(0, 300)])
        found.append(context())
        cache.clear(0)
        del cache
        found.append(context())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [None] * 4


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_current_device_stays():
    with torch.cuda.device(1):
        tensors = [rows(1).to("cuda:1"), rows(1).to("cuda:1"), rows(1, HEADS).to("cuda:1")]
    cache = new_cache(device="cuda:1")
    assert torch.cuda.current_device() == 0
    cache.prepare()
    assert torch.cuda.current_device() == 0
    with cache.begin([0]) as step:
        for layer in range(LAYERS):
            step.store_attend(layer, *tensors)
            assert torch.cuda.current_device() == 0
    del step, cache
    assert torch.cuda.current_device() == 0


# --- order --------------------------------------------------------------------------------------------------------


def test_work_follows_the_current_stream():
    """Tensors are written, and outputs read, on streams that are busy for long."""
    streams = [torch.cuda.Stream() for _ in range(3)]
    for own in (0, streams[2].cuda_stream):
        cache, quiet = new_cache(stream=own), new_cache()
        for turn in range(12):
            keys, values, queries = rows(1, seed=turn), rows(1, seed=50 + turn), rows(1, HEADS, seed=turn)
            tokens = 150 if turn == 5 else 1
            keys, values, queries = (x.expand(tokens, -1, -1).contiguous() for x in (keys, values, queries))
            torch.cuda.synchronize()
            stream = streams[turn % 2]
            sums = []
            with torch.cuda.stream(stream):
                late = [torch.zeros_like(x) for x in (keys, values, queries)]
                torch.cuda._sleep(20_000_000)
                for to, of in zip(late, (keys, values, queries)):
                    to.copy_(of)
                with cache.begin([(0, tokens)]) as step:
                    for layer in range(LAYERS):
                        sums.append(step.store_attend(layer, *late) * 1)
                for x in late:
                    x.fill_(float("nan"))
            torch.cuda.synchronize()
            with quiet.begin([(0, tokens)]) as step:
                wanted = [step.store_attend(layer, keys, values, queries) for layer in range(LAYERS)]
            assert all(torch.equal(a, b) for a, b in zip(sums, wanted))


def test_mixed_tensors_follow_both_streams():
    """PyTorch's are written late on its current stream, the others on the stream of the cache."""
    own, side = torch.cuda.Stream(), torch.cuda.Stream()
    cache, quiet = new_cache(stream=own.cuda_stream), new_cache()
    keys, values, queries = rows(1), rows(1, seed=1), rows(1, HEADS)
    for each in (cache, quiet):
        run_step(each, [(0, 40)], 40)
    late = [torch.zeros_like(x) for x in (keys, values, queries)]
    torch.cuda.synchronize()
    with torch.cuda.stream(side), cache.begin([0]) as step:
        for stream, to, of in zip((own, side, side), late, (keys, values, queries)):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)
                to.copy_(of)
        found = [step.store_attend(layer, Only(late[0]), *late[1:]) for layer in range(LAYERS)]
    with quiet.begin([0]) as step:
        wanted = [step.store_attend(layer, keys, values, queries) for layer in range(LAYERS)]
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted))


@pytest.mark.parametrize("tokens", [1, 300])
def test_tensors_of_other_libraries_may_be_freed_at_once(tokens):
    cache, same, side = new_cache(), new_cache(), torch.cuda.Stream()
    for each in (cache, same):
        run_step(each, [(0, 5000)], 5000)
    keys, values, queries = rows(tokens), rows(tokens, seed=1), rows(tokens, HEADS)
    with same.begin([(0, tokens)]) as step:
        wanted = [step.store_attend(layer, keys, values, queries) for layer in range(LAYERS)]
    with cache.begin([(0, tokens)]) as step:
        for layer in range(LAYERS):
            given, out = [x.clone() for x in (keys, values, queries)], torch.empty_like(queries)
            torch.cuda._sleep(20_000_000)
            step.store_attend(layer, *map(Only, given), out=Only(out))
            with torch.cuda.stream(side):  # as who has freed them would
                assert torch.equal(out, wanted[layer])
                [x.fill_(float("nan")) for x in given]
    for layer in range(LAYERS):
        for mine, theirs in zip(held(cache, layer, 0), held(same, layer, 0)):
            np.testing.assert_array_equal(mine, theirs)


def test_layers_may_run_on_another_stream_than_begin():
    cache = new_cache()
    run_step(cache, [(0, 40)], 40)
    step = cache.begin([0])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = []
        for layer in range(LAYERS):
            queries = rows(1, HEADS, seed=layer)
            found.append((queries, step.store_attend(layer, rows(1, seed=5), rows(1, seed=6), queries)))
    step.commit()
    for layer, (queries, outputs) in enumerate(found):
        check(cache, layer, 0, queries, outputs, 2e-3)


@pytest.mark.parametrize("last", ["cache", "step"])
def test_a_cache_may_be_dropped_while_a_stream_works_on_it(last):
    """Its memory is the next cache's once that stream is done with it, whoever held it last."""
    prompt, token = [[[rows(tokens, heads, seed=3 * layer + i) for i, heads in enumerate((KV_HEADS, KV_HEADS, HEADS))]
                      for layer in range(LAYERS)] for tokens in (300, 1)]
    on_host = new_cache(device="cpu")
    for runs, given in (([(0, 300)], prompt), ([0], token)):
        with on_host.begin(runs) as step:
            wanted = [step.store_attend(layer, *(x.cpu() for x in of)) for layer, of in enumerate(given)]
    cache, side = new_cache(), torch.cuda.Stream()
    cache.reserve([(0, 4096)])
    with cache.begin([(0, 300)]) as step:
        for layer, of in enumerate(prompt):
            step.store_attend(layer, *of)
    step = cache.begin([0])  # compiles what the step below launches
    for layer, of in enumerate(token):
        step.store_attend(layer, *of)
    step.abandon()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        step = cache.begin([0])
        assert step.graph is not None
        torch.cuda._sleep(2_000_000_000)
        outputs = [step.store_attend(layer, *of) for layer, of in enumerate(token)]
        step.commit()
    if last == "cache":
        del step, cache
    else:
        del cache, step
    following = new_cache()
    following.reserve([(0, 4096)])  # zeros
    print(f"{last}: the stream was {'done' if side.query() else 'busy'} when the memory was taken")
    torch.cuda.synchronize()
    for found, expected in zip(outputs, wanted):
        assert error(numpy(found), numpy(expected)) < 2e-3


def test_decoding_waits_for_nothing():
    cache = new_cache("saw-int4")
    cache.prepare()
    for turn in range(3):
        run_step(cache, [0, 1, 2], 3, seed=turn)
    tensors = [rows(3), rows(3, seed=1), rows(3, HEADS)]
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    began = time.perf_counter()
    for _ in range(2):
        with cache.begin([0, 1, 2]) as step:
            for layer in range(LAYERS):
                step.store_attend(layer, *tensors)
    took = time.perf_counter() - began
    busy = not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    assert busy and took < 0.3


def test_tensors_may_be_freed_at_once():
    cache, kept = new_cache("int8"), new_cache("int8")
    outputs, wanted, alive = [], [], []
    for turn in range(30):
        with cache.begin([0]) as step, kept.begin([0]) as other:
            for layer in range(LAYERS):
                given = [rows(1, seed=turn), rows(1, seed=100 + turn), rows(1, HEADS, seed=turn)]
                alive += given
                wanted.append(other.store_attend(layer, *given))
                copies = [x.clone() for x in given]
                outputs.append(step.store_attend(layer, *copies))
                del copies
                torch.full((4, HEADS, CHANNELS), float("nan"), dtype=torch.float16, device="cuda")
    assert all(torch.equal(a, b) for a, b in zip(outputs, wanted))


def test_threads():
    failures = []

    def work(cache, seed):
        try:
            for token in range(40):
                run_step(cache, [(0, 30)] if token == 0 else [0], 30 if token == 0 else 1, seed=seed + token)
        except Exception as failure:
            failures.append(failure)

    caches = [new_cache("saw-int4") for _ in range(4)]
    threads = [threading.Thread(target=work, args=(cache, 100 * i)) for i, cache in enumerate(caches)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not failures
    alone = new_cache("saw-int4")
    work(alone, 200)
    for old, new in zip(held(alone, 1, 0), held(caches[2], 1, 0)):
        np.testing.assert_array_equal(old, new)


def test_threads_of_one_cache_get_errors_and_no_crash():
    cache, texts = new_cache(), []

    def work():
        for _ in range(50):
            try:
                run_step(cache, [0], 1)
            except kvpack.Error as refused:
                texts.append(str(refused))

    threads = [threading.Thread(target=work) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    cache.abandon()
    run_step(cache, [0], 1)
    assert all("step" in text for text in texts)


# --- failures -----------------------------------------------------------------------------------------------------


def test_an_exception_abandons_the_step():
    cache = new_cache()
    run_step(cache, [(0, 10)], 10)
    with pytest.raises(RuntimeError):
        with cache.begin([0]) as step:
            step.store(0, rows(1), rows(1))
            raise RuntimeError("of the model")
    assert cache.length(0) == 10
    with pytest.raises(kvpack.Error, match="committed or abandoned"):
        step.store(1, rows(1), rows(1))
    found = run_step(cache, [0], 1, seed=1)
    check(cache, 2, 0, *found[2], 2e-3)


def test_steps_say_what_is_missing():
    cache = new_cache()
    step = cache.begin([0])
    with pytest.raises(kvpack.Error, match="has not stored"):
        step.attend(0, rows(1, HEADS))
    step.store(0, rows(1), rows(1))
    with pytest.raises(kvpack.Error, match="layer 1 has not stored"):
        step.commit()
    with pytest.raises(kvpack.Error, match="a step is open"):
        cache.begin([1])
    with pytest.raises(kvpack.Error, match="layer 3"):
        step.store(3, rows(1), rows(1))
    step.abandon()
    assert cache.length(0) == 0


def test_a_forked_process_gets_errors():
    cache = new_cache()
    run_step(cache, [(0, 10)], 10)
    torch.cuda.synchronize()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            cache.begin([0])
        except kvpack.Error:
            status = 0
        except BaseException:
            status = 2
        os._exit(status)
    for _ in range(100):
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            break
        time.sleep(0.1)
    else:
        os.kill(child, 9)
        pytest.fail("the child hangs")
    assert os.waitstatus_to_exitcode(status) == 0
    run_step(cache, [0], 1)


def test_devices_that_are_not_there():
    with pytest.raises(kvpack.Error, match="CUDA device 99"):
        new_cache(device="cuda:99")


# --- graphs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["f16", "saw-int4", "kivi:4+window=128", "turboquant-renormalized:4+centre"])
@pytest.mark.parametrize("own", ["default stream", "stream of its own"])
def test_a_graph_is_replayed_while_sequences_grow(recipe, own):
    stream = torch.cuda.Stream() if own == "stream of its own" else torch.cuda.default_stream()
    cache, eager = new_cache(recipe, stream=stream.cuda_stream), new_cache(recipe)
    for each in (cache, eager):
        run_step(each, [(0, 100)], 100, seed=7)
        run_step(each, [(1, 20)], 20, seed=8)
    keys, values = [torch.zeros(3, KV_HEADS, CHANNELS, dtype=torch.float16, device="cuda") for _ in range(2)]
    queries = torch.zeros(3, HEADS, CHANNELS, dtype=torch.float16, device="cuda")
    outputs = [torch.zeros_like(queries) for _ in range(LAYERS)]
    graphs, captured, worst = {}, 0, 0.0
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for turn in range(220):
            for to, seed in ((keys, 3 * turn), (values, 3 * turn + 1), (queries, 3 * turn + 2)):
                to.copy_(rows(3, to.shape[1], seed=seed))
            step = cache.begin([0, 1, 2])
            if step.bound_anew or step.graph not in graphs:
                graph = torch.cuda.CUDAGraph()
                torch.cuda.synchronize()
                with torch.cuda.graph(graph):
                    for layer in range(LAYERS):
                        step.store_attend(layer, keys * 1, values, queries, out=outputs[layer])
                graphs[step.graph] = (graph, step)
                captured += 1
            graphs[step.graph][0].replay()
            step.replayed()
            step.commit()
            with eager.begin([0, 1, 2]) as other:
                for layer in range(LAYERS):
                    wanted = other.store_attend(layer, keys, values, queries)
                    worst = max(worst, (wanted - outputs[layer]).abs().max().item())
    print(f"{recipe}: {captured} captures in 220 steps, largest difference {worst}")
    assert captured < 60 and worst < 2e-3 and cache.length(0) == 320
    for old, new in zip(held(cache, 1, 0), held(eager, 1, 0)):
        np.testing.assert_array_equal(old, new)


def test_a_step_that_attends_has_a_graph_of_its_own():
    cache, graphs = new_cache(), []
    run_step(cache, [0], 1)
    for begin in [lambda: cache.begin([0]), lambda: cache.begin_attend([(0, 1)])] * 2:
        step = begin()
        graphs.append(step.graph)
        step.abandon()
    assert None not in graphs and not {graphs[0], graphs[2]} & {graphs[1], graphs[3]}


def test_what_a_graph_cannot_hold_is_refused():
    cache = new_cache()
    run_step(cache, [0], 1)
    step = cache.begin([0])
    tensors = [rows(1), rows(1), rows(1, HEADS)]
    graph = torch.cuda.CUDAGraph()
    out = torch.zeros_like(tensors[2])
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for refused in (lambda: cache.begin([1]), lambda: cache.swap_out(0), lambda: cache.non_finite()):
            with pytest.raises(kvpack.Error, match="graph is captured"):
                refused()
        for layer in range(LAYERS):
            step.store_attend(layer, *tensors, out=out)
    graph.replay()
    step.replayed()
    step.commit()
    assert torch.isfinite(out).all() and cache.length(0) == 2


def test_captures_refuse_other_streams_and_other_libraries():
    cache, side = new_cache(), torch.cuda.Stream()
    run_step(cache, [0], 1)
    step, out = cache.begin([0]), torch.zeros_like(rows(1, HEADS))
    tensors, graph = [rows(1), rows(1), rows(1, HEADS)], torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        step.store_attend(0, *tensors, out=out)  # the capture follows on the stream of this call
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=side):
        for layer in range(LAYERS):
            step.store_attend(layer, *tensors, out=out)
        with pytest.raises(kvpack.Error, match="another library than PyTorch"):
            step.store_attend(0, Unordered(tensors[0]), *tensors[1:], out=out)
        with torch.cuda.stream(torch.cuda.default_stream()):
            with pytest.raises(kvpack.Error, match="captured on another stream of the cache.*after the capture"):
                step.store_attend(0, *tensors, out=out)
    graph.replay()
    step.replayed()
    step.commit()
    assert torch.isfinite(out).all() and cache.length(0) == 2


def test_a_cache_may_be_dropped_while_its_stream_is_captured():
    """Its memory is free after the capture, and no graph holds what frees it."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    x = torch.zeros(4, device="cuda")
    cache = new_cache(stream=stream.cuda_stream, sequences=1)
    run_step(cache, [0], 1)
    cache.reserve([(0, 1 << 18)])
    torch.cuda.synchronize()
    before = pool_bytes()
    with torch.cuda.graph(graph, stream=stream):
        x += 1
        del cache
        gc.collect()
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    assert x.tolist() == [2.0] * 4
    other = new_cache()  # drops what was left
    torch.cuda.synchronize()
    run_step(other, [0], 1)
    torch.cuda.synchronize()
    assert pool_bytes() < before


def test_a_long_prompt_is_for_no_graph():
    cache = new_cache()
    step = cache.begin([(0, 1000)])
    assert step.graph is None and step.bound_anew
    with pytest.raises(kvpack.Error, match="graph"):
        step.replayed()
    step.abandon()


def test_a_graph_outlives_its_cache():
    """The step of the capture keeps the memory that the graph reads and writes."""
    cache = new_cache()
    run_step(cache, [(0, 100)], 100)
    step = cache.begin([0])
    tensors, graph = [rows(1), rows(1), rows(1, HEADS)], torch.cuda.CUDAGraph()
    out = torch.zeros_like(tensors[2])
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for layer in range(LAYERS):
            step.store_attend(layer, *tensors, out=out)
    graph.replay()
    torch.cuda.synchronize()
    step.replayed()
    step.commit()
    wanted = out.clone()
    del cache
    gc.collect()
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, wanted)
