"""A cache of the parent in the workers of PyTorch's DataLoader, which are forked: on the CPU they work on with their
copy of it, on CUDA every call is an error. Nothing crashes or hangs. With ``KVPACK_TEST_DEVICE=cuda`` on a card."""

import gc
import os
import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="NOT RUN: needs PyTorch; run scripts/python.sh hf")
if not hasattr(os, "fork"):
    pytest.skip("NOT RUN: this system forks no processes", allow_module_level=True)

from torch.utils.data import DataLoader, Dataset, IterableDataset  # noqa: E402

import kvpack  # noqa: E402

CUDA = os.environ.get("KVPACK_TEST_DEVICE", "cpu") == "cuda"
DEVICE = "cuda:0" if CUDA else "cpu"
LAYERS, HEADS, KV_HEADS, CHANNELS = 2, 4, 2, 64
SECONDS = 120  # after which a worker that hangs fails the test


def rows(seed, tokens, heads, device=DEVICE):
    generator = torch.Generator().manual_seed(100 * seed + heads)
    return torch.randn(tokens, heads, CHANNELS, generator=generator).to(device)


def new(recipe="saw-int4", device=DEVICE):
    return kvpack.Cache(layers=LAYERS, query_heads=HEADS, kv_heads=KV_HEADS, head_dim=CHANNELS, recipe=recipe,
                        sequences=2, device=device)


def decoded(cache, runs, seed, device=DEVICE):
    """A step of random rows. Returns the outputs of the last layer."""
    tokens = sum(run[1] if isinstance(run, tuple) else 1 for run in runs)
    with cache.begin(runs) as step:
        for layer in range(LAYERS):
            of = [rows(10 * seed + i, tokens, heads, device) for i, heads in enumerate((KV_HEADS, KV_HEADS, HEADS))]
            outputs = step.store_attend(layer, *of)
    return outputs


class Samples(Dataset):
    """A sample is what ``work`` makes of the cache."""

    def __init__(self, cache, work, count=4):
        self.cache, self.work, self.count = cache, work, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.work(self, index)


def loaded(samples, workers):
    loader = DataLoader(samples, batch_size=1, num_workers=workers, multiprocessing_context="fork", timeout=SECONDS)
    return list(loader)


def filled():
    cache = new()
    decoded(cache, [(0, 300)], 1)
    return cache


WORKERS = pytest.mark.parametrize("workers", [1, 2])


@WORKERS
@pytest.mark.skipif(CUDA, reason="of the CPU")
def test_a_worker_attends_to_its_copy(workers):
    """Workers have steps of their own, and the parent's cache stays as it is."""
    cache = filled()

    def work(samples, index):
        outputs = decoded(samples.cache, [0], 2 + index)
        samples.cache.truncate(0, 300)
        return outputs

    given = loaded(Samples(cache, work), workers)
    assert cache.length(0) == 300
    for index, outputs in enumerate(given):
        wanted = decoded(cache, [0], 2 + index)
        cache.truncate(0, 300)
        assert torch.equal(outputs[0], wanted)


@WORKERS
@pytest.mark.skipif(CUDA, reason="of the CPU")
def test_a_worker_makes_a_cache_of_its_own(workers):
    cache = filled()
    given = loaded(Samples(cache, lambda _, index: decoded(filled(), [0], 2 + index)), workers)
    for index, outputs in enumerate(given):
        wanted = decoded(cache, [0], 2 + index)
        cache.truncate(0, 300)
        assert torch.equal(outputs[0], wanted)


def begin(samples, _):
    samples.cache.begin([0])


def own(samples, _):
    new()


CALLS = {
    "begin": begin,
    "length and begin": lambda samples, index: begin(samples, samples.cache.length(0)),
    "swap_out": lambda samples, _: samples.cache.swap_out(0),
    "fork": lambda samples, _: (samples.cache.fork(0, 1), samples.cache.begin([1])),
    "dequantize": lambda samples, _: samples.cache.dequantize(0, 0)[0]["keys"],
    "a cache of its own": own,
}


@WORKERS
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.skipif(not CUDA, reason="NOT RUN: needs an NVIDIA GPU and KVPACK_TEST_DEVICE=cuda")
def test_calls_of_a_worker_on_cuda_are_errors(call, workers):
    cache = filled()
    with pytest.raises(kvpack.Error):
        loaded(Samples(cache, CALLS[call]), workers)
    assert torch.isfinite(decoded(cache, [0], 2)).all() and cache.length(0) == 301


@WORKERS
@pytest.mark.skipif(not CUDA, reason="NOT RUN: needs an NVIDIA GPU and KVPACK_TEST_DEVICE=cuda")
def test_a_step_that_the_parent_opened_is_an_error_in_a_worker(workers):
    cache = filled()
    step = cache.begin([0])

    def work(samples, index):
        for call in (lambda: step.store(0, rows(1, 1, KV_HEADS, "cpu"), rows(2, 1, KV_HEADS, "cpu")), step.commit,
                     lambda: step.attend(0, rows(3, 1, HEADS, "cpu"))):
            with pytest.raises(kvpack.Error):
                call()
        return index

    assert len(loaded(Samples(cache, work), workers)) == 4
    for layer in range(LAYERS):
        step.store_attend(layer, *(rows(i, 1, heads) for i, heads in enumerate((KV_HEADS, KV_HEADS, HEADS))))
    step.commit()
    assert cache.length(0) == 301


@WORKERS
def test_errors_of_a_worker_reach_the_parent(workers):
    """With their text, of every class of the module."""
    cache = filled()
    wrong = {
        "wrong tensor": lambda samples, _: kvpack.quantize(np.zeros(3), np.zeros(3), "int8"),
        "wrong recipe": lambda samples, _: kvpack.Recipe("kivy:2"),
    }
    for work in wrong.values():
        with pytest.raises(kvpack.Error) as here:
            work(None, 0)
        with pytest.raises(type(here.value)) as there:
            loaded(Samples(cache, work), workers)
        assert str(here.value) in str(there.value)
    decoded(cache, [0], 2)


@WORKERS
def test_a_worker_may_free_the_cache(workers):
    """The dataset alone holds it there. What frees it does not stop the worker, nor harm the parent's."""
    samples = Samples(filled(), None)

    def work(samples, index):
        samples.cache = None
        gc.collect()
        return index

    samples.work = work
    assert sorted(int(index) for index in loaded(samples, workers)) == [0, 1, 2, 3]
    assert torch.isfinite(decoded(samples.cache, [0], 2)).all()


@WORKERS
def test_a_parent_that_works_meanwhile(workers):
    """Threads of the parent hold the cache's lock while workers are forked."""
    cache, failures, done = filled(), [], threading.Event()

    def work_on():
        try:
            while not done.is_set():
                decoded(cache, [1], 3)
        except Exception as failure:
            failures.append(failure)

    def work(samples, index):
        try:
            decoded(samples.cache, [0], 2, "cpu")
        except kvpack.Error:
            return index  # on CUDA always; on the CPU where a step was open, or the lock was taken
        return index

    thread = threading.Thread(target=work_on)
    thread.start()
    try:
        for _ in range(3):
            assert len(loaded(Samples(cache, work), workers)) == 4
    finally:
        done.set()
        thread.join()
    assert not failures and cache.length(0) == 300


class Stream(IterableDataset):
    """An engine that yields outputs for as long as it lasts."""

    def __init__(self, cache, tokens):
        self.cache, self.tokens = cache, tokens

    def __iter__(self):
        for token in range(self.tokens):
            yield decoded(self.cache, [0], 2 + token)


@WORKERS
def test_a_stream_of_a_worker(workers):
    cache = filled()
    loader = DataLoader(Stream(cache, 5), batch_size=None, num_workers=workers, multiprocessing_context="fork",
                        persistent_workers=True, timeout=SECONDS)
    if CUDA:
        with pytest.raises(kvpack.Error):
            list(loader)
    else:
        for _ in range(2):  # workers live on, and so do their caches
            assert len(list(loader)) == 5 * workers
    assert cache.length(0) == 300
