"""Tensors that calls take, and those that they refuse."""

import pathlib
import re

import numpy as np
import pytest

import kvpack

SHAPE = dict(layers=1, kv_heads=2, query_heads=4, head_dim=64, recipe="f16")


def rows(dtype=np.float32, heads=2, tokens=3):
    return np.random.default_rng(tokens).standard_normal((tokens, heads, 64)).astype(dtype)


class OnlyDlpack:
    def __init__(self, array, versions=True):
        self.array, self.versions = array, versions

    def __dlpack__(self, **options):
        if not self.versions and "max_version" in options:
            raise TypeError("max_version is unknown")
        return self.array.__dlpack__(**options)


class Pointer:
    """What PyTorch's tensors have besides DLPack."""

    def __init__(self, array, dtype="torch.float32", device="cpu"):
        self.array, self.shape, self.dtype, self.device = array, array.shape, dtype, device

    def data_ptr(self):
        return self.array.ctypes.data

    def stride(self):
        return tuple(stride // self.array.itemsize for stride in self.array.strides)


def stored(keys):
    """Keys as a cache holds them."""
    cache = kvpack.Cache(**SHAPE)
    with cache.begin([(0, 3)]) as step:
        step.store(0, keys, rows())
    return cache.dequantize(0, 0)[0]["keys"].transpose(1, 0, 2)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_libraries_agree(dtype):
    keys = rows(dtype)
    wanted = keys.astype(np.float16).astype(np.float32)
    read_only = keys.copy()
    read_only.flags.writeable = False
    strided = np.asfortranarray(keys)
    wide = np.concatenate([keys, keys], axis=2)[:, :, :64]
    backwards = keys[::-1].copy()[::-1]
    named = {np.float32: "torch.float32", np.float16: "torch.float16"}[dtype]
    for given in (keys, read_only, strided, wide, backwards, OnlyDlpack(keys), OnlyDlpack(keys, False),
                  OnlyDlpack(wide), Pointer(keys, named), Pointer(wide, named)):
        np.testing.assert_array_equal(stored(given), wanted)


def peak_bytes():
    """The most memory that this process has had since the last call."""
    status = pathlib.Path("/proc/self/status").read_text()
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", status).group(1))


def peak_of(call):
    """Bytes that a call needs at most at a time."""
    peak_bytes()
    before = peak_bytes()
    call()
    return peak_bytes() - before


needs_peaks = pytest.mark.skipif(not pathlib.Path("/proc/self/clear_refs").exists(),
                                 reason="NOT RUN: Linux alone tells the peak")


@needs_peaks
@pytest.mark.parametrize("layout", ["contiguous", "heads first", "every other token"])
def test_keys_are_read_where_they_lie(layout):
    tokens = 1 << 15
    whole = np.ones((2 * tokens, 2, 64), np.float32)
    heads_first = whole.reshape(2, 2 * tokens, 64)[:, :tokens].transpose(1, 0, 2)
    keys = {"contiguous": whole[:tokens], "heads first": heads_first,
            "every other token": whole[::2]}[layout]
    cache = kvpack.Cache(**{**SHAPE, "recipe": "saw-int4"})
    cache.reserve([(0, tokens, "chunk")])
    with cache.begin([(0, tokens, "chunk")]) as step:
        assert peak_of(lambda: step.store(0, keys, keys)) < keys.nbytes / 2


def test_an_output_may_be_its_input():
    packed = kvpack.quantize(rows(), rows(), "f16", query_heads=4)
    queries = rows(heads=4)
    wanted = kvpack.attend(packed, queries)
    longer = np.concatenate([queries, queries])
    for out in (queries, longer[1:4]):
        given = out.copy()
        assert kvpack.attend(packed, out, out=out) is out
        np.testing.assert_array_equal(out, kvpack.attend(packed, given))
    np.testing.assert_array_equal(queries, wanted)


def unaligned():
    return np.frombuffer(bytes(1) + rows().tobytes(), dtype=np.uint8)[1:].view(np.float32).reshape(3, 2, 64)


@pytest.mark.parametrize("given, text", [
    (None, "has no __dlpack__"),
    ([1.0], "has no __dlpack__"),
    (rows(np.float64), "float64"),
    (OnlyDlpack(rows(np.float64)), "64 bits"),
    (rows().astype(np.int32), "int32"),
    (rows().astype(">f4"), "use float32"),
    (rows().astype(np.complex64), "complex64"),
    (rows(heads=3), r"\[3, 3, 64\]"),
    (rows()[0], r"\[2, 64\]"),
    (np.float32(1), r"\[\]"),
    (rows()[:, :, :32], r"\[3, 2, 32\]"),
    (rows(tokens=2), "the keys have 2"),
    (rows()[:0], "the keys have 0"),
    (unaligned(), "no multiple of 4"),
    (Pointer(rows(), device="cuda:0"), "it lies on CUDA device 0"),
    (Pointer(rows(), device="mps"), "mps"),
    (Pointer(rows(), dtype="torch.int8"), "torch.int8"),
])
def test_wrong_keys(given, text):
    with pytest.raises(kvpack.TensorError, match=text):
        stored(given)


def test_wrong_tokens_of_a_step():
    cache = kvpack.Cache(**SHAPE)
    with cache.begin([(0, 3)]) as step:
        with pytest.raises(kvpack.Error):
            step.store(0, rows(tokens=4), rows(tokens=4))
        with pytest.raises(kvpack.Error, match="layer 1"):
            step.store(1, rows(), rows())
        step.store(0, rows(), rows())
        with pytest.raises(kvpack.Error, match="queries"):
            step.attend(0, rows(heads=4, tokens=2))


def test_outputs():
    cache = kvpack.Cache(**SHAPE)
    queries = rows(heads=4)
    with cache.begin([(0, 3)]) as step:
        step.store(0, rows(), rows())
        new = step.attend(0, queries)
        out = np.empty_like(queries)
        assert step.attend(0, queries, out=out) is out
        np.testing.assert_array_equal(out, new)
        halves = step.attend(0, queries, out=np.empty(queries.shape, np.float16))
        np.testing.assert_array_equal(halves, new.astype(np.float16))
        read_only = np.empty_like(queries)
        read_only.flags.writeable = False
        for wrong, text in ((read_only, "read-only"), (OnlyDlpack(read_only), "read-only"),
                            (np.empty((3, 4, 128), np.float32)[:, :, ::2], "contiguous"),
                            (np.empty((2, 4, 64), np.float32), "that of the queries"),
                            (np.empty((3, 4, 64), np.float64), "float64"), ("out", "has no __dlpack__")):
            with pytest.raises(kvpack.TensorError, match=text):
                step.attend(0, queries, out=wrong)
        words = (queries.view(np.uint32) >> 16).astype(np.uint16)
        with pytest.raises(kvpack.TensorError, match="out: NumPy has no bfloat16; pass out="):
            step.attend(0, Pointer(words, "torch.bfloat16"))
        step.attend(0, Pointer(words, "torch.bfloat16"), out=out)
        np.testing.assert_allclose(out, new, atol=0.05)


def test_a_used_capsule_is_refused():
    class Used:
        def __init__(self):
            self.capsule = rows().__dlpack__()
            np.from_dlpack(self)

        def __dlpack__(self, **_):
            return self.capsule

        def __dlpack_device__(self):
            return (1, 0)

    with pytest.raises(kvpack.TensorError, match="no capsule of DLPack"):
        stored(Used())


def test_exporters_that_fail_are_named():
    class Failing:
        def __dlpack__(self, **_):
            raise RuntimeError("requires grad")

    with pytest.raises(kvpack.TensorError, match="keys.*requires grad"):
        stored(Failing())
