"""The operators of PyTorch. Needs PyTorch: ``scripts/python.sh hf``. With ``KVPACK_TEST_DEVICE=cuda`` on a card."""

import os

import pytest

torch = pytest.importorskip("torch", reason="NOT RUN: needs PyTorch; run scripts/python.sh hf")

import kvpack  # noqa: E402
import kvpack.ops  # noqa: E402

DEVICE = os.environ.get("KVPACK_TEST_DEVICE", "cpu")
LAYERS, KV_HEADS, HEADS, CHANNELS = 3, 2, 4, 64
HIDDEN = HEADS * CHANNELS


def rows(tokens, heads, seed=0):
    generator = torch.Generator().manual_seed(100 * seed + 10 * tokens + heads)
    return torch.randn(tokens, heads, CHANNELS, generator=generator).to(DEVICE)


def new_layers(recipe="saw-int4"):
    device = "cuda:0" if DEVICE == "cuda" else "cpu"
    cache = kvpack.Cache(layers=LAYERS, query_heads=HEADS, kv_heads=KV_HEADS, head_dim=CHANNELS, recipe=recipe,
                         sequences=2, device=device)
    return kvpack.ops.Layers(cache, DEVICE)


def model(layers):
    """Three layers of attention, whose weights are fixed."""
    generator = torch.Generator().manual_seed(7)
    weights = [(torch.randn(HIDDEN, (HEADS + 2 * KV_HEADS) * CHANNELS, generator=generator) / 16).to(DEVICE)
               for _ in range(LAYERS)]

    def forward(hidden):
        for layer, weight in enumerate(weights):
            q, k, v = (hidden @ weight).split([HIDDEN, KV_HEADS * CHANNELS, KV_HEADS * CHANNELS], dim=-1)
            heads = lambda x: x.reshape(x.shape[0], -1, CHANNELS)
            if layer == 1:  # nobody reads what this store returns
                layers.store(layer, heads(k), heads(v))
                attended = layers.attend(layer, heads(q))
            else:
                attended = layers.store_attend(layer, heads(k), heads(v), heads(q))
            hidden = torch.tanh(hidden + attended.reshape(hidden.shape[0], HIDDEN))
        return hidden

    return forward


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_model_is_one_graph(backend):
    if backend == "inductor" and DEVICE == "cpu" and not os.environ.get("KVPACK_TEST_INDUCTOR"):
        pytest.skip("NOT RUN: Inductor on the CPU needs a C++ compiler; set KVPACK_TEST_INDUCTOR=1")
    torch._dynamo.reset()
    eager, compiled = new_layers(), new_layers()
    forward, graph = model(eager), torch.compile(model(compiled), backend=backend, fullgraph=True)
    for turn, runs in enumerate([[(0, 150)], [0], [0], [0, 1], [1]]):
        tokens = sum(run[1] if isinstance(run, tuple) else 1 for run in runs)
        hidden = rows(tokens, HEADS, turn).view(tokens, HIDDEN)
        with torch.no_grad(), eager.begin(runs), compiled.begin(runs):
            torch.testing.assert_close(graph(hidden), forward(hidden), atol=2e-3, rtol=2e-3)
    assert compiled.cache.length(0) == eager.cache.length(0) == 153
    assert torch._dynamo.utils.counters["graph_break"] == {}


class Again:
    """A step of the second sequence. Each call opens one, since ``opcheck`` calls operators several times."""

    def __init__(self, layers):
        self.layers = layers

    def __getattr__(self, name):
        self.layers.cache.abandon()
        step = self.layers.cache.begin([(1, 5)])
        if name == "attend":
            step.store(0, rows(5, KV_HEADS), rows(5, KV_HEADS, 1))
        return getattr(step, name)


@pytest.mark.parametrize("name", ["store", "attend", "store_attend"])
def test_operators_of_a_step_are_as_they_say(name):
    layers = new_layers("f16")
    layers.step = Again(layers)
    tensors = {"store": (KV_HEADS, KV_HEADS), "attend": (HEADS,), "store_attend": (KV_HEADS, KV_HEADS, HEADS)}[name]
    given = [rows(5, heads, seed) for seed, heads in enumerate(tensors)]
    torch.library.opcheck(getattr(torch.ops.kvpack, name).default, (layers.order, *given, layers.number, 0))


@pytest.mark.skipif(DEVICE != "cpu", reason="they are functions of the CPU")
def test_operators_without_a_cache_are_as_they_say():
    keys, values, queries = rows(70, KV_HEADS), rows(70, KV_HEADS, 1), rows(3, HEADS, 2)
    for dtype in (torch.float32, torch.float16):
        k, v, q = keys.to(dtype), values.to(dtype), queries.to(dtype)
        torch.library.opcheck(torch.ops.kvpack.round_trip.default, (k, v, "kivi:4"))
        torch.library.opcheck(torch.ops.kvpack.attend_packed.default, (q, k, v, "kivi:4", "causal"))
    back = kvpack.ops.round_trip(keys, values, "int8")
    assert all((x - y).abs().max() < 0.05 for x, y in zip(back, (keys, values)))
    near = kvpack.ops.attend_packed(queries, keys, values, "f16")
    wanted = torch.nn.functional.scaled_dot_product_attention(
        queries.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), enable_gqa=True)
    torch.testing.assert_close(near, wanted.transpose(0, 1), atol=2e-3, rtol=2e-3)


def test_what_operators_refuse():
    layers = new_layers()
    given = [rows(1, heads) for heads in (KV_HEADS, KV_HEADS, HEADS)]
    with pytest.raises(kvpack.Error, match="no step is open"):
        layers.store_attend(0, *given)
    with layers.begin([0]) as step:
        for layer in range(LAYERS):
            layers.store_attend(layer, *given)
    with pytest.raises(kvpack.Error, match="committed or abandoned"):
        layers.store_attend(0, *given)
    order, number = layers.order, layers.number
    del layers, step
    with pytest.raises(kvpack.Error, match="is gone"):
        torch.ops.kvpack.store_attend(order, *given, number, 0)
