"""Models of transformers, small and with random weights. Needs PyTorch and transformers: ``scripts/python.sh hf``.

With ``KVPACK_TEST_DEVICE=cuda`` they run on a card.
"""

import copy
import inspect
import os
import weakref

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import kvpack  # noqa: E402
import kvpack.hf  # noqa: E402

DEVICE = os.environ.get("KVPACK_TEST_DEVICE", "cpu")

# The name of the argument that takes a cache: versions of transformers differ.
CACHE = "cache" if "cache" in inspect.signature(transformers.LlamaModel.forward).parameters else "past_key_values"

SMALL = dict(vocab_size=97, hidden_size=128, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, pad_token_id=0, bos_token_id=1,
             eos_token_id=None, initializer_range=0.1)

FAMILIES = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen3": (transformers.Qwen3Config, {}),
    "mistral": (transformers.MistralConfig, dict(sliding_window=16)),
    "gemma2": (transformers.Gemma2Config, dict(sliding_window=16, query_pre_attn_scalar=64, attn_logit_softcapping=5.0,
                                               layer_types=["sliding_attention", "full_attention"] * 1 +
                                               ["sliding_attention"])),
    "gemma3": (transformers.Gemma3TextConfig, dict(sliding_window=16, query_pre_attn_scalar=64,
                                                   layer_types=["sliding_attention", "sliding_attention",
                                                                "full_attention"])),
    # Every expert is used: where noise changes the choice of experts, outputs jump.
    "gpt_oss": (transformers.GptOssConfig, dict(sliding_window=16, num_local_experts=2, num_experts_per_tok=2,
                                                layer_types=["sliding_attention", "full_attention",
                                                             "sliding_attention"])),
}


@pytest.fixture(params=FAMILIES)
def model(request):
    torch.manual_seed(5)
    config, options = FAMILIES[request.param]
    config = config(**{**SMALL, **options})
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    if request.param == "gpt_oss":
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
    return model.to(DEVICE)


def prompts(rows, tokens):
    """Prompts with padding on the left, each row three tokens more."""
    torch.manual_seed(rows)
    ids = torch.randint(2, 97, (rows, tokens))
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, :3 * row] = 0
    return ids.masked_fill(mask == 0, 0).to(DEVICE), mask.to(DEVICE)


def generated(model, ids, mask, **options):
    with torch.no_grad():
        return model.generate(ids, attention_mask=mask, do_sample=False, return_dict_in_generate=True,
                              output_logits=True, **options)


def distance(given, wanted):
    return ((given - wanted).norm() / wanted.norm()).item()


def same_tokens(given, wanted, prompt):
    """Logits differ by f16 noise, and so do those of two tokens where the sequences part."""
    for row, (mine, theirs) in enumerate(zip(given.sequences[:, prompt:], wanted.sequences[:, prompt:])):
        differ = (mine != theirs).nonzero()
        same = int(differ[0]) if len(differ) else len(theirs)
        for step in range(min(same + 1, len(theirs))):
            logits = wanted.logits[step][row]
            assert distance(given.logits[step][row], logits) < 5e-3
            if step == same:
                assert abs(logits[mine[step]] - logits[theirs[step]]) < 5e-3 * logits.norm()


@pytest.mark.parametrize("rows, tokens", [(1, 1), (1, 33), (3, 40)])
def test_greedy_tokens_are_those_of_the_model(model, rows, tokens):
    ids, mask = prompts(rows, tokens)
    wanted = generated(model, ids, mask, max_new_tokens=30)
    given = generated(kvpack.hf.enable(model, "f16"), ids, mask, max_new_tokens=30)
    assert isinstance(getattr(given, CACHE), kvpack.hf.PackedCache)
    same_tokens(given, wanted, tokens)
    again = generated(kvpack.hf.disable(model), ids, mask, max_new_tokens=30)
    assert torch.equal(torch.stack(again.logits), torch.stack(wanted.logits))


def test_a_cache_is_freed_at_once(model):
    ids, mask = prompts(2, 20)
    given = generated(kvpack.hf.enable(model, "f16"), ids, mask, max_new_tokens=3)
    gone = weakref.ref(getattr(given, CACHE).held)
    del given
    assert gone() is None


def test_a_cache_of_the_caller_is_used_or_refused(model):
    ids, mask = prompts(1, 20)
    kvpack.hf.enable(model, "f16")
    cache, other = kvpack.hf.PackedCache("f16"), transformers.DynamicCache()
    first = generated(model, ids, mask, max_new_tokens=3, **{CACHE: cache})
    assert getattr(first, CACHE) is cache and cache.get_seq_length() == 22
    for given in (other, transformers.StaticCache(model.config, max_cache_len=40)):
        with pytest.raises(kvpack.Error, match=rf"is a {type(given).__name__}.*pass kvpack.hf.PackedCache\(recipe\)"):
            generated(model, ids, mask, max_new_tokens=3, **{CACHE: given})


def test_prompts_in_chunks_are_the_same(model):
    ids, mask = prompts(3, 40)
    mask[1, :18], mask[2, :] = 0, 1  # a chunk of padding alone
    kvpack.hf.enable(model, "f16")
    wanted = generated(model, ids, mask, max_new_tokens=4)
    given = generated(model, ids, mask, max_new_tokens=4, prefill_chunk_size=16)
    same_tokens(given, wanted, 40)


@pytest.mark.parametrize("graphs", [False, True])
def test_masks_that_hide_stored_tokens_are_refused(model, graphs, monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(kvpack.hf._graphs, "Graphs", OnTheHost)
    ids, mask = prompts(2, 12)
    hidden, shown, gap = mask.clone(), torch.ones_like(mask), mask.clone()
    hidden[0, 2] = hidden[0, :2] = 0
    gap[0, 5] = 0
    kvpack.hf.enable(model, "f16")
    if graphs:
        kvpack.hf.use_graphs(model)
    cache = kvpack.hf.PackedCache("f16")
    call = lambda mask: model.model(input_ids=ids[:, 11:], attention_mask=mask, **{CACHE: cache})
    with torch.no_grad():
        model.model(input_ids=ids[:, :11], attention_mask=mask[:, :11], **{CACHE: cache})
        for wrong, text in ((hidden, "row 0: the mask shows 8 earlier tokens; the cache holds 11"), (gap, "padding"),
                            (shown, "row 1: the mask shows 11 earlier tokens; the cache holds 8"),
                            (None, "row 1: there is no mask, which shows 11 earlier tokens; the cache holds 8"),
                            (mask[:, 11:], r"shape \[2, 1\]; kvpack.hf takes \[2, 12\]"),
                            (torch.cat([mask, mask[:, :1]], 1), r"shape \[2, 13\]"),
                            (mask[:, None, None].bool(), r"shape \[2, 1, 1, 12\]"),
                            (mask[:1], r"shape \[1, 12\]")):
            with pytest.raises(kvpack.Error, match=text):
                call(wrong)
            assert cache.get_seq_length() == 11
        call(mask)
    assert cache.get_seq_length() == 12 and cache.held.cache.length(1) == 9


def test_gradients_are_not_lost_silently(model):
    ids, mask = prompts(2, 12)
    kvpack.hf.enable(model, "f16")
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask, **{CACHE: kvpack.hf.PackedCache("f16")}).logits
    given = model(ids, attention_mask=mask, **{CACHE: kvpack.hf.PackedCache("f16")}).logits
    assert torch.equal(given, wanted) and given.requires_grad and not wanted.requires_grad
    with pytest.raises(kvpack.Error, match="has no gradient"):
        given.sum().backward()


def test_masks_that_are_not_causal_are_refused(model):
    ids, mask = prompts(2, 12)
    kvpack.hf.enable(model, "f16")
    model.config.is_causal = False
    with pytest.raises(kvpack.Error, match="a mask of its own"):
        model(ids, attention_mask=mask, **{CACHE: kvpack.hf.PackedCache("f16")})


def test_beams_are_those_of_the_model(model):
    ids, mask = prompts(2, 20)
    wanted = generated(model, ids, mask, max_new_tokens=16, num_beams=3)
    given = generated(kvpack.hf.enable(model, "f16"), ids, mask, max_new_tokens=16, num_beams=3)
    assert torch.equal(given.sequences, wanted.sequences)


def logits_of_parts(model, ids, mask, first, cache=None):
    """Logits of the tokens from ``first`` on, after a forward pass of those before. Returns them and the cache."""
    with torch.no_grad():
        given = {} if cache is None else {CACHE: cache}
        held = model(ids[:, :first], attention_mask=mask[:, :first], use_cache=True, **given)
        cache = getattr(held, CACHE)
        return model(ids[:, first:], attention_mask=mask, **{CACHE: cache}).logits, cache


@pytest.mark.parametrize("recipe, most", [("int8", 0.03), ("saw-int4", 0.3), ("kivi:4", 0.3),
                                          ("int8+layers=0:f16", 0.03)])
def test_packed_recipes_stay_near(model, recipe, most):
    ids, mask = prompts(2, 150)
    wanted, _ = logits_of_parts(model, ids, mask, 130)
    kvpack.hf.enable(model, recipe)
    given, cache = logits_of_parts(model, ids, mask, 130, kvpack.hf.PackedCache(recipe))
    assert 0 < distance(given, wanted) < most
    assert cache.get_seq_length() == 150 and cache.memory()["in_use_bytes"] > 0
    assert cache.held.cache.layers == 3 and cache.held.cache.length(1) == 147


def test_a_forward_pass_that_fails_leaves_the_cache_as_it_was(model):
    ids, mask = prompts(1, 40)
    kvpack.hf.enable(model, "f16")
    wanted, _ = logits_of_parts(model, ids, mask, 30, kvpack.hf.PackedCache("f16"))
    cache = kvpack.hf.PackedCache("f16")
    with torch.no_grad():
        model(ids[:, :30], attention_mask=mask[:, :30], **{CACHE: cache})
        failing = model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids[:, 30:], attention_mask=mask, **{CACHE: cache})
        failing.remove()
        assert cache.get_seq_length() == 30
        again = model(ids[:, 30:], attention_mask=mask, **{CACHE: cache}).logits
    assert torch.equal(again, wanted)
    cache.crop(-10)
    with torch.no_grad():
        again = model(ids[:, 30:], attention_mask=mask, **{CACHE: cache}).logits
    assert cache.get_seq_length() == 40 and distance(again, wanted) < 5e-3


def test_rows_are_cropped_to_what_is_no_padding(model):
    ids, mask = prompts(2, 10)
    mask[1, :7] = 0
    kvpack.hf.enable(model, "f16")
    wanted, _ = logits_of_parts(model, ids, mask, 5, kvpack.hf.PackedCache("f16"))
    cache = kvpack.hf.PackedCache("f16")
    lengths = lambda: (cache.get_seq_length(), [cache.held.cache.length(slot) for slot in cache.held.slots])
    with torch.no_grad():
        model(ids, attention_mask=mask, **{CACHE: cache})
        assert lengths() == (10, [10, 3])
        cache.crop(-5)
        assert lengths() == (5, [5, 0])
        again = model(ids[:, 5:], attention_mask=mask, **{CACHE: cache}).logits
    assert lengths() == (10, [10, 3]) and distance(again, wanted) < 5e-3
    cache.crop(-11)  # more than there is, as other caches of transformers take it
    assert lengths() == (0, [0, 0])


@pytest.mark.parametrize("model", ["mistral", "gemma2"], indirect=True)
def test_a_crop_that_one_row_refuses_changes_no_row(model):
    ids, mask = prompts(2, 300)
    mask[0, :90] = 0
    kvpack.hf.enable(model, "f16")
    cache, tokens = kvpack.hf.PackedCache("f16"), torch.full((2, 1), 5, device=DEVICE)
    lengths = lambda: (cache.get_seq_length(), [cache.held.cache.length(slot) for slot in cache.held.slots])
    with torch.no_grad():
        model(ids, attention_mask=mask, **{CACHE: cache})
        mask = torch.cat([mask, torch.ones_like(tokens)], 1)
        wanted = model(tokens, attention_mask=mask, **{CACHE: cache}).logits
        before = lengths()
        # The first row holds all of its tokens. The second has released those that its window is past.
        with pytest.raises(kvpack.Error, match="sliding window"):
            cache.crop(-200)
        assert lengths() == before == (301, [211, 298])
        cache.crop(-1)
        again = model(tokens, attention_mask=mask, **{CACHE: cache}).logits
    assert lengths() == before and distance(again, wanted) < 5e-3


class OnTheHost(kvpack.hf._graphs.Graphs):
    """Graphs that run their layers again, for tests without a card."""

    replays = 0

    def fits(self, tensor):
        return True

    def number(self, step):
        return 1

    def anew(self, step):
        return self.replays == 5

    def capture(self, layers, device):
        def replay():
            self.replays += 1
            layers()

        return type("Graph", (), {"replay": staticmethod(replay)})

    def finish(self, step):
        pass


def compiler(function):
    """Traces on the CPU, and also fuses on a card."""
    return torch.compile(function, backend="eager" if DEVICE == "cpu" else "inductor")


@pytest.mark.parametrize("rows, options", [(1, {}), (3, {}), (1, {"compiler": compiler}), (3, {"compiler": compiler})])
def test_graphs_generate_the_same(model, rows, options, monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(kvpack.hf._graphs, "Graphs", OnTheHost)
    ids, mask = prompts(rows, 40)
    kvpack.hf.enable(model, "f16")
    wanted = generated(model, ids, mask, max_new_tokens=30)
    kvpack.hf.use_graphs(model, **options)
    given = generated(model, ids, mask, max_new_tokens=30)
    graphs, held = model._kvpack_graphs, getattr(given, CACHE).held
    assert torch.equal(given.sequences, wanted.sequences)
    for mine, theirs in zip(given.logits, wanted.logits):
        assert distance(mine, theirs) < (1e-3 if options else 1e-4)  # fused kernels round less often
    assert getattr(given, CACHE).get_seq_length() == 69 and held.cache.length(0) == 69
    if graphs.refused is None:
        assert len(held.graphs) > 0
        assert DEVICE != "cpu" or graphs.replays == 28  # 29 steps; the first of them goes without
    else:
        print(f"without graphs: {graphs.refused}")
        assert model.config.model_type == "gpt_oss"  # it chooses experts on the host
    compiled = [module for module in model.modules() if "forward" in vars(module)]
    assert compiled == [model.model], "the model's own code stays as it was"
    if DEVICE != "cpu":  # the replays of a test hold more
        gone = weakref.ref(held)
        del given, held
        assert gone() is None, "something keeps the cache besides the caller"
    again = generated(kvpack.hf.disable(model), ids, mask, max_new_tokens=3)
    assert len(again.logits) == 3


def on_the_host(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(kvpack.hf._graphs, "Graphs", OnTheHost)


@pytest.mark.parametrize("graphs", [False, True])
def test_a_cache_serves_another_model_once_it_is_empty(model, graphs, monkeypatch):
    on_the_host(monkeypatch)
    other = copy.deepcopy(model)
    torch.manual_seed(5)
    for of in other.parameters():
        torch.nn.init.normal_(of, std=0.3)
    ids, mask = prompts(1, 30)
    for of in (model, other):
        kvpack.hf.enable(of, "f16")
        if graphs:
            kvpack.hf.use_graphs(of)
    cache, wanted = kvpack.hf.PackedCache("f16"), generated(other, ids, mask, max_new_tokens=12)
    generated(model, ids, mask, max_new_tokens=12, **{CACHE: cache})
    cache.reset()
    given = generated(other, ids, mask, max_new_tokens=12, **{CACHE: cache})
    assert torch.equal(torch.stack(given.logits), torch.stack(wanted.logits))


def test_a_cache_follows_how_its_model_attends(model):
    ids, mask = prompts(1, 30)
    kvpack.hf.enable(model, "f16")
    cache = kvpack.hf.PackedCache("f16")
    generated(model, ids, mask, max_new_tokens=3, **{CACHE: cache})
    kvpack.hf.disable(model)
    for module in model.modules():
        if hasattr(module, "scaling"):
            module.scaling *= 0.5
    wanted = generated(model, ids, mask, max_new_tokens=3)
    kvpack.hf.enable(model, "f16")
    with torch.no_grad(), pytest.raises(kvpack.Error, match="attends otherwise"):
        model(input_ids=ids[:, :1], attention_mask=torch.ones_like(ids)[:, :1].repeat(1, 33), **{CACHE: cache})
    cache.reset()
    same_tokens(generated(model, ids, mask, max_new_tokens=3, **{CACHE: cache}), wanted, 30)


@pytest.mark.parametrize("options", [{}, {"compiler": compiler}])
def test_a_copy_of_a_model_with_graphs_has_its_own_weights(model, options, monkeypatch):
    on_the_host(monkeypatch)
    ids, mask = prompts(1, 20)
    kvpack.hf.use_graphs(kvpack.hf.enable(model, "f16"), **options)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.norm.weight.add_(1)
        call = lambda of: of.model(input_ids=ids, attention_mask=mask, **{CACHE: kvpack.hf.PackedCache("f16")})[0]
        mine, theirs = call(model), call(other)
    assert distance(mine, theirs) > 0.1
    assert other._kvpack_graphs.decoder is other.model and other.model.forward is other._kvpack_graphs
    if options:
        own = set(other.modules())
        assert all(of in own for of, *_ in other._kvpack_graphs.compiled.replaced if isinstance(of, torch.nn.Module))


def test_graphs_of_outgrown_sizes_are_dropped(model, monkeypatch):
    if DEVICE != "cpu":
        pytest.skip("the numbers of steps are the card's")
    calls = iter(range(1000))
    monkeypatch.setattr(OnTheHost, "number", lambda self, step: next(calls) // 3)
    monkeypatch.setattr(OnTheHost, "anew", lambda self, step: False)
    on_the_host(monkeypatch)
    ids, mask = prompts(1, 8)
    kvpack.hf.use_graphs(kvpack.hf.enable(model, "f16"))
    held = getattr(generated(model, ids, mask, max_new_tokens=60), CACHE).held
    if model._kvpack_graphs.refused is None:
        assert len(held.graphs) == 8 and max(held.graphs)[0] == 19


def test_graphs_outlive_inference_mode(model, monkeypatch):
    on_the_host(monkeypatch)
    ids, mask = prompts(1, 8)
    kvpack.hf.use_graphs(kvpack.hf.enable(model, "f16"))
    cache = kvpack.hf.PackedCache("f16")
    with torch.inference_mode():
        first = generated(model, ids, mask, max_new_tokens=6, **{CACHE: cache})
    ids = first.sequences.clone()
    again = generated(model, ids, torch.ones_like(ids), max_new_tokens=6, **{CACHE: cache})
    assert again.sequences.shape[1] == ids.shape[1] + 6


def test_masks_of_layers_are_the_same(model):
    if not hasattr(model.config, "layer_types"):
        pytest.skip("the model takes one mask")
    ids, mask = prompts(2, 12)
    kvpack.hf.enable(model, "f16")
    kinds = dict.fromkeys(model.config.layer_types)
    call = lambda masks: model.model(input_ids=ids, attention_mask=masks, **{CACHE: kvpack.hf.PackedCache("f16")})
    with torch.no_grad():
        call({kind: mask.clone() for kind in kinds})
        if len(kinds) > 1:
            other = {kind: mask if at else torch.ones_like(mask) for at, kind in enumerate(kinds)}
            with pytest.raises(kvpack.Error, match="another mask than layer 0"):
                call(other)


def test_copies_of_a_cache(model):
    ids, mask = prompts(1, 12)
    kvpack.hf.enable(model, "f16")
    base = kvpack.hf.PackedCache("f16")
    first, second = copy.deepcopy(base), copy.deepcopy(base)
    given = [generated(model, ids, mask, max_new_tokens=4, **{CACHE: of}) for of in (first, second)]
    assert torch.equal(given[0].sequences, given[1].sequences)
    assert first.memory()["in_use_bytes"] > 0 and base.memory()["allocated_bytes"] == 0
    with pytest.raises(kvpack.Error, match="cannot be copied"):
        copy.deepcopy(first)


def test_rows_that_are_not_those_of_the_batch_change_nothing(model):
    ids, mask = prompts(2, 12)
    cache = getattr(generated(kvpack.hf.enable(model, "f16"), ids, mask, max_new_tokens=3), CACHE)
    before = [cache.held.cache.length(row) for row in range(2)]
    for rows in ([0, 0, 1], [0, 0, 0], [1]):
        with pytest.raises(kvpack.Error, match="keeps the rows of its batch"):
            cache.reorder_cache(torch.tensor(rows))
    assert [cache.held.cache.length(slot) for slot in cache.held.slots] == before and cache.held.slots == [0, 1]


def test_a_compiler_that_fails_behind_the_last_layer_stores_once(model, monkeypatch):
    on_the_host(monkeypatch)
    norm = type(model.model.norm)
    inputs = []

    def failing(function):
        def fails(self, *args, **kwargs):
            if self is model.model.norm:
                inputs.append(args)
                raise RuntimeError("no memory")
            return function(self, *args, **kwargs)

        return fails if function is norm.forward else function

    ids, mask = prompts(2, 20)
    kvpack.hf.enable(model, "f16")
    wanted = generated(model, ids, mask, max_new_tokens=6)
    kvpack.hf.use_graphs(model, compiler=failing)
    given = generated(model, ids, mask, max_new_tokens=6)
    assert torch.equal(given.sequences, wanted.sequences) and len(inputs) == 1
    assert "no memory" in kvpack.hf.why_no_graphs(model)
    assert getattr(given, CACHE).held.cache.length(0) == 25


def test_compilers_that_fail_leave_the_model_alone(model, monkeypatch):
    def failing(function):
        def fails(*args, **kwargs):
            raise RuntimeError("no compiler here")

        return fails

    if DEVICE == "cpu":
        monkeypatch.setattr(kvpack.hf._graphs, "Graphs", OnTheHost)
    ids, mask = prompts(2, 20)
    kvpack.hf.enable(model, "f16")
    wanted = generated(model, ids, mask, max_new_tokens=6)
    kvpack.hf.use_graphs(model, compiler=failing)
    given = generated(model, ids, mask, max_new_tokens=6)
    assert "no compiler here" in kvpack.hf.why_no_graphs(model)
    assert torch.equal(torch.stack(given.logits), torch.stack(wanted.logits))
    assert not [module for module in model.model.layers.modules() if "forward" in vars(module)]


def test_what_is_refused(model):
    for recipe in ("h2o:0.2/f16", "kivy:2"):
        with pytest.raises(kvpack.Error):
            kvpack.hf.enable(model, recipe)
    with pytest.raises(kvpack.Error, match="call kvpack.hf.enable"):
        kvpack.hf.use_graphs(model)
    kvpack.hf.enable(model, "f16")
    with pytest.raises(kvpack.Error, match="such as torch.compile, not True"):
        kvpack.hf.use_graphs(model, compiler=True)
    with pytest.raises(kvpack.Error, match="uses no graphs"):
        kvpack.hf.why_no_graphs(model)
    ids, mask = prompts(2, 10)
    with pytest.raises(kvpack.Error, match="needs a packed cache"):
        model(ids, attention_mask=mask)
    with pytest.raises(kvpack.Error, match="padding on the left"):
        model(ids, attention_mask=mask.flip(1), **{CACHE: kvpack.hf.PackedCache("f16")})


def test_other_models_are_refused():
    config = transformers.GPT2Config(n_embd=64, n_layer=1, n_head=1)
    with pytest.raises(kvpack.Error, match="gpt2"):
        kvpack.hf.enable(transformers.AutoModelForCausalLM.from_config(config), "f16")
