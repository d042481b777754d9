"""The functions, and golden vectors of the published code."""

import json
import pathlib

import numpy as np
import pytest
from reference import attention, error

import kvpack

GOLDEN = pathlib.Path(__file__).parents[2] / "tests" / "golden"


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def golden(name):
    """The tensors of a file of safetensors."""
    data = (GOLDEN / f"{name}.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + size])
    types = {"F32": np.float32, "F16": np.float16, "I32": np.int32, "I64": np.int64, "U8": np.uint8, "F64": np.float64}
    of = lambda entry: np.frombuffer(data[8 + size:][slice(*entry["data_offsets"])], types[entry["dtype"]])
    tensors = {key: of(entry).reshape(entry["shape"]) for key, entry in header.items() if key != "__metadata__"}
    return tensors, header.get("__metadata__", {})


@pytest.mark.parametrize("recipe", kvpack.recipes())
def test_functions_agree_with_float64(recipe):
    packed = kvpack.quantize(normal(0, 256, 2, 64), normal(1, 256, 2, 64), recipe, query_heads=6)
    assert len(packed) == 256
    keys, values = kvpack.dequantize(packed)
    q = normal(2, 5, 6, 64)
    for visible, sees in (("all", np.ones((5, 256), bool)), ("causal", np.tri(5, 256, k=251, dtype=bool))):
        wanted, wanted_lse = attention(q, keys.astype(np.float64), values.astype(np.float64), sees)
        assert error(kvpack.attend(packed, q, visible=visible), wanted) < 1e-5
        outputs, lse = kvpack.attend_states(packed, q, visible=visible)
        assert error(outputs, wanted) < 1e-5 and error(lse, wanted_lse) < 1e-5


def test_states_of_parts_merge():
    keys, values, q = normal(0, 300, 2, 64), normal(1, 300, 2, 64), normal(2, 3, 2, 64)
    parts = [kvpack.attend_states(kvpack.quantize(keys[part], values[part], "f16"), q)
             for part in (slice(0, 100), slice(100, 300))]
    outputs, lse = kvpack.merge(*parts)
    wanted, wanted_lse = kvpack.attend_states(kvpack.quantize(keys, values, "f16"), q)
    assert error(outputs, wanted) < 1e-5 and error(lse, wanted_lse) < 1e-5


def test_what_functions_refuse():
    keys, q = normal(0, 3, 2, 64), normal(1, 1, 2, 64)
    with pytest.raises(kvpack.TensorError, match="dimensions"):
        kvpack.quantize(keys[0], keys[0], "f16")
    with pytest.raises(kvpack.TensorError, match="values"):
        kvpack.quantize(keys, keys[:2], "f16")
    huge = np.broadcast_to(keys[:1], (1 << 45, 2, 64))
    with pytest.raises(kvpack.TensorError, match="no memory"):
        kvpack.quantize(huge, huge, "f16")
    with pytest.raises(kvpack.Error, match="evicts"):
        kvpack.quantize(keys, keys, "h2o:0.2/f16")
    with pytest.raises(kvpack.TensorError, match="nan|NaN"):
        kvpack.quantize(np.full_like(keys, np.nan), keys, "int8")
    with pytest.raises(kvpack.Error):
        kvpack.quantize(keys[:0], keys[:0], "f16")
    packed = kvpack.quantize(keys, keys, "f16")
    with pytest.raises(kvpack.TensorError, match="queries"):
        kvpack.attend(packed, normal(0, 1, 4, 64))
    with pytest.raises(kvpack.Error):
        kvpack.attend(packed, q[:0])
    with pytest.raises(ValueError, match="'all' or 'causal'"):
        kvpack.attend(packed, q, visible="window")
    outputs, lse = kvpack.attend_states(packed, q)
    with pytest.raises(kvpack.TensorError, match="log-sum-exps"):
        kvpack.merge((outputs, lse[:, :1]), (outputs, lse))
    with pytest.raises(kvpack.TensorError, match="second"):
        kvpack.merge((outputs, lse), (outputs[:, :1], lse[:, :1]))


def test_recipes():
    assert "f16" in kvpack.recipes() and len(kvpack.recipes()) > 5
    text = "turboquant-renormalized:4+centre+sink=128"
    assert str(kvpack.Recipe(text)) == text
    assert kvpack.Recipe("h2o:0.2/saw-int4").evicts and not kvpack.Recipe("kivi:2").evicts
    with pytest.raises(kvpack.Error, match="did you mean kivi"):
        kvpack.Recipe("kivy:2")


@pytest.mark.parametrize("name", ["01-mha4_n128_d64", "02-gqa2_n96_d128", "03-gqa4_n256_d64_b2", "04-gqa8_n200_d64",
                                  "05-n1_d64", "06-f16_n256_d64"])
def test_golden_decoding(name):
    tensors, _ = golden(f"attention.decode.{name}")
    for sequence, q in enumerate(tensors["in.q"]):
        k, v = (tensors[f"in.{x}"][sequence].transpose(1, 0, 2) for x in "kv")
        packed = kvpack.quantize(k, v, "f16", query_heads=len(q))
        outputs, lse = kvpack.attend_states(packed, q[None])
        # Keys and values in f32 are rounded to f16.
        assert error(outputs[0], tensors["out.output"][sequence]) < 2e-3
        assert error(lse[0], tensors["out.lse"][sequence]) < 2e-3


@pytest.mark.parametrize("name", ["01-causal_d64", "02-ragged3_gqa4_d64_f16", "04-window7_gqa8_d64_f16",
                                  "05-softcap_d128", "06-sinks_gqa8_d64_f16"])
def test_golden_prompts(name):
    tensors, metadata = golden(f"attention.prefill.{name}")
    params, kv, starts = json.loads(metadata["params"]), tensors["in.kv_indptr"], tensors["in.q_indptr"]
    k, v, q = (tensors[f"in.{x}"] for x in "kvq")
    sequences, window = len(kv) - 1, params["window_left"]
    sinks = [[float(x) for x in tensors["in.sinks"]]] if "in.sinks" in tensors else None
    cache = kvpack.Cache(
        layers=1, query_heads=q.shape[1], kv_heads=k.shape[1], head_dim=k.shape[2], recipe="f16", sequences=sequences,
        scale=params["sm_scale"], soft_cap=params["logits_soft_cap"] or None, sinks=sinks,
        windows=None if window < 0 else [window + 1],
    )
    with cache.begin([(sequence, int(kv[sequence + 1] - kv[sequence])) for sequence in range(sequences)]) as step:
        step.store(0, k, v)
    runs = [(sequence, int(starts[sequence + 1] - starts[sequence])) for sequence in range(sequences)]
    step = cache.begin_attend([run for run in runs if run[1] > 0])
    outputs, lse = step.attend_states(0, q)
    assert error(outputs, tensors["out.o"]) < 2e-3 and error(lse, tensors["out.lse"]) < 2e-3


@pytest.mark.parametrize("name", ["01-p2_d64", "02-p5_one_empty_d80"])
def test_golden_merges(name):
    tensors, _ = golden(f"attention.merge.{name}")
    parts = list(zip(tensors["in.o"], tensors["in.lse"]))
    merged = parts[0]
    for part in parts[1:]:
        merged = kvpack.merge(merged, part)
    np.testing.assert_allclose(merged[0], tensors["out.o"], atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(merged[1], tensors["out.lse"], atol=1e-5, rtol=1e-5)
