"""Packed caches in Hugging Face transformers.

``enable(model, recipe)`` makes ``model.generate`` keep its keys and values packed and attend to the packed form.
"""

import itertools
import types

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

import kvpack

from . import _graphs

MODELS = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt_oss")
"""The ``model_type`` of the models that ``enable`` takes."""

_NAME = "kvpack"


class _Plan:
    """How the layers of a model attend, as ``kvpack.Cache`` takes it."""

    def __init__(self, config, attention):
        layers = config.num_hidden_layers
        self.modules = sorted(attention, key=lambda module: module.layer_idx)
        if [module.layer_idx for module in self.modules] != list(range(layers)):
            raise kvpack.Error(f"model '{config.model_type}': its layers of attention were not found")
        scales = {float(module.scaling) for module in self.modules}
        if len(scales) != 1:
            raise kvpack.Error(f"model '{config.model_type}': its layers scale differently: {sorted(scales)}")
        self.scale = scales.pop()
        self.soft_cap = getattr(config, "attn_logit_softcapping", None)
        window = getattr(config, "sliding_window", None)
        types = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * layers
        self.windows = [window if kind == "sliding_attention" else None for kind in types]
        self.sinks = [getattr(module, "sinks", None) for module in self.modules]

    def check(self, layer, scaling, sliding_window, softcap, s_aux):
        """The options of a call are those that the cache was made with."""
        given = (None if scaling is None else float(scaling), sliding_window, softcap, s_aux is not None)
        known = (self.scale, self.windows[layer], self.soft_cap, self.sinks[layer] is not None)
        if given != known and given != (None, *known[1:]):
            text = f"layer {layer} attends with (scale, window, cap, sinks) {given}"
            raise kvpack.Error(f"{text}; its model says {known}")

    def identity(self):
        """What tells whether a cache was made for layers that attend like these. It asks the device nothing."""
        sinks = [None if sinks is None else (sinks.data_ptr(), sinks._version) for sinks in self.sinks]
        return self.scale, self.soft_cap, self.windows, sinks

    def options(self):
        sinks = [None if sinks is None else sinks.detach().float().tolist() for sinks in self.sinks]
        return {"layers": len(self.windows), "scale": self.scale, "soft_cap": self.soft_cap,
                "windows": self.windows if any(self.windows) else None,
                "sinks": sinks if any(of is not None for of in sinks) else None}


class _Held:
    """The keys and values of all layers, and the step that a forward pass has open."""

    def __init__(self, recipe):
        self.recipe = recipe
        self.cache = None
        self.slots = []
        self.seen = 0
        self.step = None
        self.tokens = 0
        self.new = []
        self.masks = []
        self.attention = None
        # Graphs of decoding steps, by the step's number and the shapes of the call: see ``_graphs``.
        self.graphs, self.known, self.stale, self.key = {}, set(), set(), None
        self.captured = False
        # Whose they are, where its parameters lie, and whether that was asked since the last prompt.
        self.owner, self.weights, self.looked = None, [], False

    def batch(self):
        return len(self.slots)

    def open(self, step):
        """Layers work on this step, whose end is not theirs: they are captured."""
        self.step, self.tokens, self.new, self.captured = step, 1, [1] * self.batch(), True

    def close(self):
        self.step, self.captured = None, False

    def drop_graphs(self):
        self.graphs, self.known, self.stale, self.key = {}, set(), set(), None

    def note(self, number, bound_anew):
        """Graphs of this number are of no use after a step whose memory was bound again."""
        if number is not None and bound_anew:
            self.stale.add(number)

    def begin(self, plan, keys, query, mask, device=None):
        self.abandon()
        batch, heads, tokens, channels = query.shape
        new = self.new_tokens(mask, batch, tokens)
        if not self.is_of(plan):
            self.cache = None
            self.drop_graphs()
        if self.cache is None:
            self.attention = plan.identity()
            self.cache = kvpack.Cache(
                query_heads=heads, kv_heads=keys.shape[1], head_dim=channels, sequences=batch, recipe=self.recipe,
                **_device_of(device or query.device), **plan.options(),
            )
            self.slots = list(range(batch))
        self.tokens, self.new, self.masks = tokens, new, [mask]
        self.looked &= tokens == 1
        runs = [slot if tokens == 1 else (slot, count) for slot, count in zip(self.slots, self.new) if count > 0]
        self.step = self.cache.begin(runs) if runs else None
        if self.step is not None:
            self.note(self.step.graph, self.step.bound_anew)

    def is_of(self, plan):
        """Whether the cache was made for layers that attend as the plan says. One that holds tokens has to be."""
        if self.cache is None or self.attention == plan.identity():
            return True
        if any(self.cache.length(slot) for slot in self.slots):
            raise kvpack.Error("the cache holds tokens of a model that attends otherwise; pass another cache")
        return False

    def new_tokens(self, mask, batch, tokens):
        """How many of the newest ``tokens`` of each row are no padding. A mask that hides a stored token is refused:
        attention sees all of them."""
        if self.slots and batch != len(self.slots):
            raise kvpack.Error(f"the cache holds a batch of {len(self.slots)}, and the call has {batch} rows")
        stored = [self.cache.length(slot) for slot in self.slots] or [0] * batch
        if mask is None:
            shown, new = [self.seen + tokens] * batch, [tokens] * batch
        else:
            shown, new = self.of_mask(mask, batch, tokens)
        for row, held in enumerate(stored):
            earlier = shown[row] - new[row]
            if earlier != held:
                given = "there is no mask, which shows" if mask is None else "the mask shows"
                hint = "pass the mask of the earlier calls and of the new tokens"
                raise kvpack.Error(f"row {row}: {given} {earlier} earlier tokens; the cache holds {held}: {hint}")
        return new

    def of_mask(self, mask, batch, tokens):
        """How many tokens of each row a mask shows, and how many of the newest ``tokens``."""
        given, wanted = list(_shape_of(mask) or []), [batch, self.seen + tokens]
        if given != wanted:
            text = f"the call passed a mask of shape {given}"
            raise kvpack.Error(f"{text}; kvpack.hf takes {wanted}: the batch, and the earlier and the new tokens")
        mask = mask.bool()
        gaps = (mask[:, 1:] < mask[:, :-1]).sum(1)
        shown, new, gaps = torch.stack([mask.sum(1), mask[:, self.seen:].sum(1), gaps]).tolist()
        if any(gaps):
            raise kvpack.Error("kvpack.hf takes padding on the left; the mask has padding behind a token")
        return shown, new

    def attend(self, layer, plan, keys, values, query, mask):
        """Stores and attends: queries ``[batch, heads, tokens, head_dim]``, outputs with the middle dimensions
        exchanged. The first layer opens a step, and the last commits it."""
        if self.captured:
            return self.of_layer(layer, keys, values, query)  # a graph: the step is open, and its calls end it
        if layer == 0:
            self.begin(plan, keys, query, mask)
        elif self.tokens != query.shape[2] or len(self.slots) != query.shape[0]:
            raise kvpack.Error(f"layer {layer} follows no layer 0 of the same forward pass")
        elif not self.is_mask(mask):
            raise kvpack.Error(f"layer {layer} has another mask than layer 0; kvpack.hf takes one for all layers")
        outputs = self.of_layer(layer, _no_gradient(keys), _no_gradient(values), _no_gradient(query))
        if layer + 1 == len(plan.windows):
            if self.step is not None:
                self.step.commit()
            self.step, self.seen, self.masks = None, self.seen + self.tokens, []
            if self.tokens > 1:
                self.cache.trim()  # of the f16 form of a prompt, which lived as long as its step
        return _without_backward(outputs, query, keys, values, plan.sinks[layer])

    def is_mask(self, mask):
        """Whether a mask is that of layer 0. Models copy it for each kind of their layers."""
        first = self.masks[0]
        if any(mask is known for known in self.masks):
            return True
        if first is None or mask is None or mask.shape != first.shape or not torch.equal(mask.bool(), first.bool()):
            return False
        self.masks.append(mask)
        return True

    def of_layer(self, layer, keys, values, query):
        batch, heads, tokens, channels = query.shape
        if all(count == tokens for count in self.new):
            if tokens == 1:  # each call of PyTorch takes the host as long as a kernel's launch
                rows = lambda x: x if (x := x.squeeze(2)).is_contiguous() else x.contiguous()
            else:
                rows = lambda x: x.transpose(1, 2).reshape(-1, x.shape[1], channels).contiguous()
            packed = self.step.store_attend(layer, rows(keys), rows(values), rows(query))
            return packed.view(batch, tokens, heads, channels)
        outputs = query.new_zeros(batch, tokens, heads, channels)
        if self.step is None:
            return outputs
        rows = lambda x: torch.cat([x[row, :, tokens - count:].transpose(0, 1) for row, count in enumerate(self.new)])
        packed = self.step.store_attend(layer, rows(keys), rows(values), rows(query))
        for row, part in enumerate(packed.split(self.new)):
            outputs[row, tokens - self.new[row]:] = part
        return outputs

    def abandon(self):
        """Rolls back what a forward pass that failed left open."""
        if self.step is not None:
            self.step.abandon()
            self.step = None

    def reset(self):
        self.abandon()
        for slot in self.slots:
            self.cache.clear(slot)
        self.seen = 0

    def reorder(self, rows):
        if len(rows) != len(self.slots):
            given = f"{len(rows)} were given for {len(self.slots)}"
            raise kvpack.Error(f"a packed cache keeps the rows of its batch: {given}")
        self.abandon()
        sources = [self.slots[row] for row in rows]
        free = [slot for slot in self.slots if slot not in sources]
        for slot in free:
            self.cache.clear(slot)
        taken, slots = set(), []
        for source in sources:
            slot = source
            if source in taken:
                slot = free.pop()
                self.cache.fork(source, slot)
            taken.add(slot)
            slots.append(slot)
        self.slots = slots

    def crop(self, tokens_to_remove):
        """Crops all rows, or none: one may have released what its window does not see."""
        self.abandon()
        if tokens_to_remove == 0:
            return
        # A row with padding holds fewer tokens than the batch has columns.
        left = [(slot, max(0, self.cache.length(slot) + tokens_to_remove)) for slot in self.slots]
        for slot, length in left:
            self.cache.check_truncate(slot, length)
        for slot, length in left:
            self.cache.truncate(slot, length)
        self.seen = max(0, self.seen + tokens_to_remove)


class PackedLayer(CacheLayerMixin):
    """One layer of a ``PackedCache``. ``update`` keeps the new keys and values until attention comes, which stores
    them. What concerns the rows or tokens of all layers, layer 0 does for all."""

    is_sliding = False
    is_croppable = True

    def __init__(self, held, layer):
        super().__init__()
        self.held, self.layer = held, layer
        self.pending = None

    def lazy_initialization(self, key_states, value_states):
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        """Returns the new keys and values, which know this layer: they are handles, not all that is held."""
        self.is_initialized = True
        self.pending = (key_states, value_states)
        key_states._kvpack_layer = self
        return key_states, value_states

    def attend(self, plan, query, mask):
        pending, self.pending = self.pending, None
        if pending is None:
            raise kvpack.Error(f"layer {self.layer} attends a second time to the same keys")
        return self.held.attend(self.layer, plan, *pending, query, mask)

    def get_mask_sizes(self, query_length):
        return self.held.seen + query_length, 0

    def get_seq_length(self):
        return self.held.seen

    def get_max_length(self):
        return -1

    get_max_cache_shape = get_max_length

    def reset(self):
        self.pending = None
        if self.layer == 0:
            self.held.reset()

    def reorder_cache(self, beam_idx):
        """Row ``b`` goes on with what row ``beam_idx[b]`` holds. Beams share pages."""
        if self.layer == 0 and self.held.cache is not None:
            self.held.reorder(beam_idx.tolist())

    def batch_select_indices(self, indices):
        self.reorder_cache(torch.arange(len(self.held.slots))[indices.cpu()])

    def batch_repeat_interleave(self, repeats):
        raise kvpack.Error("a packed cache keeps the rows of its batch; pass as many rows from the beginning")

    def crop(self, tokens_to_remove):
        """Drops the newest ``-tokens_to_remove`` tokens."""
        if tokens_to_remove > 0:
            raise kvpack.Error("crop: give the number of tokens to remove, as a negative number")
        if self.layer == 0:
            self.held.crop(tokens_to_remove)


class PackedCache(Cache):
    """A cache whose layers are packed by a recipe: one ``kvpack.Cache`` of all layers, ``held.cache``."""

    def __init__(self, recipe):
        _check_recipe(recipe)
        self.recipe = str(recipe)
        self.held = held = _Held(self.recipe)
        numbers = itertools.count()  # without a reference to the cache, so that it is freed at once
        super().__init__(layer_class_to_replicate=lambda: PackedLayer(held, next(numbers)))

    def __deepcopy__(self, memo):
        if self.held.cache is not None:
            hint = "make one for each text, or crop this one back to what they have in common"
            raise kvpack.Error(f"a packed cache that was used cannot be copied; {hint}")
        return PackedCache(self.recipe)

    def memory(self):
        """Bytes of all layers, as ``kvpack.Cache.memory``."""
        if self.held.cache is None:
            return {"allocated_bytes": 0, "in_use_bytes": 0, "bits_per_element": 0.0, "stores": []}
        return self.held.cache.memory()


def enable(model, recipe):
    """Lets ``model.generate`` use packed caches of a recipe. Returns the model.

    ``generate`` makes a ``PackedCache`` of the recipe. One that you pass to it is used as it is; other caches are
    refused. Raises ``kvpack.Error`` for models that are not listed in ``MODELS``, and for recipes that evict.
    """
    config = model.config.get_text_config(decoder=True)
    if config.model_type not in MODELS:
        raise kvpack.Error(f"model '{config.model_type}': kvpack.hf knows {', '.join(MODELS)}")
    _check_recipe(recipe)
    is_attention = lambda module: hasattr(module, "layer_idx") and hasattr(module, "scaling")
    plan = _Plan(config, [module for module in model.modules() if is_attention(module)])
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _mask)
    disable(model)
    for module in plan.modules:
        module._kvpack_plan = plan
    model._kvpack_attention = config._attn_implementation
    model.set_attn_implementation(_NAME)
    prepare = type(model)._prepare_cache_for_generation

    def prepare_packed(self, generation_config, model_kwargs, *args, **kwargs):
        _check_cache(model_kwargs)
        prepared = prepare(self, generation_config, model_kwargs, *args, **kwargs)
        for name in _graphs.CACHES:
            if isinstance(model_kwargs.get(name), DynamicCache):
                model_kwargs[name] = PackedCache(recipe)
        return prepared

    model._prepare_cache_for_generation = types.MethodType(prepare_packed, model)
    return model


def use_graphs(model, compiler=None):
    """Lets a model that ``enable`` took replay its decoding from CUDA graphs: where each row of a batch has one new
    token, its layers are launched at once. Returns the model.

    A graph is captured for a cache in its second such step, and again where its memory grows: that takes longer than a
    step. Models that cannot be captured, such as those that choose experts on the host, go on without graphs;
    ``why_no_graphs`` says why. The forward pass of the decoder must depend on its arguments and weights alone.

    ``compiler=torch.compile`` fuses the small kernels of these steps: norms, rotations of queries and keys, and the
    blocks behind attention are compiled where they are captured, and nowhere else. It may be any function that takes a
    function and returns one that computes the same. Fused kernels round less often, so logits move within the noise of
    their type.
    """
    if not hasattr(model, "_kvpack_attention"):
        raise kvpack.Error("use_graphs: call kvpack.hf.enable(model, recipe) first")
    if compiler is not None and not callable(compiler):
        raise kvpack.Error(f"use_graphs: compiler= takes a function such as torch.compile, not {compiler!r}")
    _without_graphs(model)
    decoder = model.get_decoder()
    attention = [module for module in decoder.modules() if hasattr(module, "_kvpack_plan")]
    compiled = None if compiler is None else _graphs.Compiled(decoder, attention, compiler)
    model._kvpack_graphs = _graphs.Graphs(decoder, compiled)
    return model


def _without_graphs(model):
    if hasattr(model, "_kvpack_graphs"):
        model._kvpack_graphs.remove()
        del model._kvpack_graphs


def why_no_graphs(model):
    """Why a model with ``use_graphs`` runs without them, if it cannot be captured; ``None`` if nothing failed."""
    return _graphs.why(getattr(model, "_kvpack_graphs", None))


def disable(model):
    """Takes ``enable`` and ``use_graphs`` back. Returns the model."""
    _without_graphs(model)
    if hasattr(model, "_kvpack_attention"):
        del model._prepare_cache_for_generation
        model.set_attn_implementation(model._kvpack_attention)
        del model._kvpack_attention
        for module in model.modules():
            if hasattr(module, "_kvpack_plan"):
                del module._kvpack_plan
    return model


def _check_recipe(recipe):
    if kvpack.Recipe(str(recipe)).evicts:
        hint = "it evicts tokens, and here all are kept; leave out what is before the slash"
        raise kvpack.Error(f"recipe {recipe}: {hint}")


def _device_of(device):
    """The device and the stream that it works on now: a cache gives memory back in the order of that stream."""
    device = torch.device(device)
    if device.type != "cuda":
        return {"device": str(device)}
    stream = torch.cuda.current_stream(device)
    return {"device": f"cuda:{stream.device_index}", "stream": stream.cuda_stream}


def _check_cache(model_kwargs):
    """What the caller's own cache holds would be lost: it cannot be replaced."""
    for name in _graphs.CACHES:
        given = model_kwargs.get(name)
        if given is not None and not isinstance(given, PackedCache):
            text = f"{name}= is a {type(given).__name__}, and this model attends to packed caches"
            raise kvpack.Error(f"{text}; pass kvpack.hf.PackedCache(recipe), or none")


def _no_gradient(tensor):
    return tensor.detach() if tensor.requires_grad else tensor


class _NoBackward(torch.autograd.Function):
    """Outputs that depend on tensors with gradients which attention does not compute."""

    @staticmethod
    def forward(ctx, outputs, *inputs):
        return outputs.view_as(outputs)

    @staticmethod
    def backward(ctx, *gradients):
        raise kvpack.Error("attention to a packed cache has no gradient; call kvpack.hf.disable(model) before training")


def _without_backward(outputs, *inputs):
    if torch.is_grad_enabled() and any(of is not None and of.requires_grad for of in inputs):
        return _NoBackward.apply(outputs, *inputs)
    return outputs


def _mask(*args, attention_mask=None, use_vmap=False, allow_is_causal_skip=True, **kwargs):
    """The padding, ``[batch, tokens]`` or none: plans know the rest. Masks that are not causal do not allow that they
    are left out."""
    if use_vmap or not allow_is_causal_skip:
        raise kvpack.Error("kvpack.hf knows causal masks and sliding windows; the model asks for a mask of its own")
    return attention_mask


def _shape_of(mask):
    """The shape of a mask, or none."""
    return getattr(mask, "shape", None)


def _attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, sliding_window=None, softcap=None,
               s_aux=None, **kwargs):
    layer = getattr(key, "_kvpack_layer", None)
    if layer is None:
        raise kvpack.Error("a forward pass of a packed model needs a packed cache: pass kvpack.hf.PackedCache(recipe)")
    if kwargs.get("output_attentions"):
        raise kvpack.Error("kvpack returns no weights of attention; leave output_attentions out")
    if dropout:
        raise kvpack.Error("kvpack computes no dropout; call model.eval()")
    plan = module._kvpack_plan
    plan.check(layer.layer, scaling, sliding_window, softcap, s_aux)
    return layer.attend(plan, query, attention_mask), None
