"""Models of transformers in half precision on a card, small and with random weights; by hand."""

import copy

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from test_hf import CACHE, FAMILIES, SMALL, distance, generated  # noqa: E402

import kvpack  # noqa: E402
import kvpack.hf  # noqa: E402

HALF = [torch.float16, torch.bfloat16]
TESTED = ("llama", "mistral", "gemma2", "gemma3", "gpt_oss")


@pytest.fixture(params=[(family, dtype) for family in TESTED for dtype in HALF],
                ids=lambda of: f"{of[0]}-{str(of[1])[6:]}")
def models(request):
    """The same model in half precision and in float32."""
    family, dtype = request.param
    torch.manual_seed(5)
    config, options = FAMILIES[family]
    given = {**SMALL, **options, "max_position_embeddings": 8192, "initializer_range": 0.05,
             "tie_word_embeddings": False}
    if family == "gpt_oss":
        given["num_experts_per_tok"] = 2  # of 2: noise changes no choice of experts
    config = config(**given)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    if family == "gpt_oss":
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
    half = model.to("cuda", dtype)
    return half, copy.deepcopy(half).float()


def prompts(rows, tokens):
    torch.manual_seed(rows)
    ids, mask = torch.randint(2, 97, (rows, tokens)), torch.ones(rows, tokens, dtype=torch.long)
    for row in range(rows):
        mask[row, :min(3 * row, tokens - 1)] = 0
    return ids.masked_fill(mask == 0, 0).cuda(), mask.cuda()


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("tokens", [1, 33, 300, 5000])
def test_logits_have_the_noise_of_the_type(models, rows, tokens):
    """A prompt and four tokens: no farther from float32 than the model itself, in its own type."""
    half, whole = models
    ids, mask = prompts(rows, tokens + 4)
    seen = mask.bool().unsqueeze(-1)

    def logits(model, cache=None):
        with torch.no_grad():
            held = model(ids[:, :tokens], attention_mask=mask[:, :tokens], use_cache=True,
                         **({CACHE: cache} if cache is not None else {}))
            parts, cache = [held.logits], getattr(held, CACHE)
            for token in range(tokens, tokens + 4):
                found = model(ids[:, token:token + 1], attention_mask=mask[:, :token + 1], **{CACHE: cache})
                parts.append(found.logits)
        return torch.cat(parts, 1).float().masked_fill(~seen, 0)

    wanted, own = logits(whole), logits(half)
    kvpack.hf.enable(half, "f16")
    given = logits(half, kvpack.hf.PackedCache("f16"))
    noise = distance(own, wanted)
    assert distance(given, wanted) < 1.5 * noise + 1e-4
    print(f"noise {noise:.1e}, with kvpack {distance(given, wanted):.1e}")


def of_lengths(lengths):
    """A batch of prompts of these lengths, padded on the left."""
    torch.manual_seed(9)
    ids, mask = torch.randint(2, 97, (len(lengths), max(lengths))), torch.ones(len(lengths), max(lengths))
    for row, length in enumerate(lengths):
        mask[row, :max(lengths) - length] = 0
    return ids.masked_fill(mask == 0, 0).cuda(), mask.long().cuda()


def lead(model, scale):
    """Lets the last token speak louder: each token has a successor whose logit leads. Attention still adds to every
    logit, and a small scale lets it choose some tokens."""
    with torch.no_grad():
        after = torch.randperm(97, generator=torch.Generator().manual_seed(3)).to(model.device)
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        assert embedding is not head
        head.copy_(embedding[after])
        embedding.mul_(scale)
    return torch.argsort(after)


def test_greedy_tokens_are_equal(models):
    """200 tokens of prompts of 1, 33, 300 and 5,000, of models whose tokens do not hang on the noise of their type:
    float32 gives the same ones. Then packed caches do so in every row."""
    half, whole = models
    after = lead(half, 8.0)
    whole.load_state_dict(half.state_dict())
    lengths = [1, 1, 33, 33, 300, 300, 5000, 5000]
    ids, mask = of_lengths(lengths)
    wanted, exact = (generated(model, ids, mask, max_new_tokens=200) for model in (half, whole))
    assert torch.equal(wanted.sequences, exact.sequences), "these tokens hang on noise"
    given = generated(kvpack.hf.enable(half, "f16"), ids, mask, max_new_tokens=200)
    assert isinstance(getattr(given, CACHE), kvpack.hf.PackedCache)
    assert torch.equal(given.sequences, wanted.sequences)
    new = wanted.sequences[:, max(lengths) - 1:]
    chosen = (new[:, 1:] != after[new[:, :-1]]).float().mean()
    least = min((of.topk(2).values @ of.new_tensor([1.0, -1.0])).min() / of.abs().max() for of in exact.logits)
    apart = max(distance(mine.float(), theirs.float()) for mine, theirs in zip(given.logits, wanted.logits))
    print(f"8 of 8 sequences; attention chose {chosen:.0%}; least lead {least:.1e}; logits {apart:.1e} apart")


def test_greedy_tokens_are_those_of_the_model(models):
    """200 tokens of 3 prompts. They may part where the model's two best logits lie within the noise of the type."""
    half, _ = models
    ids, mask = prompts(3, 40)
    wanted = generated(half, ids, mask, max_new_tokens=200)
    given = generated(kvpack.hf.enable(half, "f16"), ids, mask, max_new_tokens=200)
    assert isinstance(getattr(given, CACHE), kvpack.hf.PackedCache)
    same, noise = 0, {torch.float16: 1e-2, torch.bfloat16: 8e-2}[half.dtype]
    for row, (mine, theirs) in enumerate(zip(given.sequences[:, 40:], wanted.sequences[:, 40:])):
        differ = (mine != theirs).nonzero()
        if not len(differ):
            same += 1
            continue
        step = int(differ[0])
        logits = wanted.logits[step][row].float()
        assert abs(logits[mine[step]] - logits[theirs[step]]) < noise * logits.abs().max()
    print(f"{same} of 3 sequences of 200 tokens are equal")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_graphs_of_models_on_two_devices():
    """PyTorch's own stream for captures belongs to the first device that captures."""
    config = FAMILIES["llama"][0](**SMALL)
    first = transformers.AutoModelForCausalLM.from_config(config).eval().cuda()
    ids = torch.randint(2, 97, (1, 20), device="cuda")
    for device in ("cuda:0", "cuda:1"):
        model = copy.deepcopy(first).to(device)
        given = [ids.to(device), torch.ones_like(ids).to(device)]
        wanted = generated(kvpack.hf.enable(model, "f16"), *given, max_new_tokens=8)
        found = generated(kvpack.hf.use_graphs(model), *given, max_new_tokens=8)
        assert kvpack.hf.why_no_graphs(model) is None and torch.equal(found.sequences, wanted.sequences)
        assert torch.cuda.current_device() == 0
