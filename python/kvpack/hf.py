"""Packed caches in Hugging Face transformers.

``enable(model, recipe)`` makes ``model.generate`` keep its keys and values packed and attend to the packed form.
"""

import types

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

import kvpack

MODELS = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt_oss")
"""The ``model_type`` of the models that ``enable`` takes."""

_NAME = "kvpack"


class PackedLayer(CacheLayerMixin):
    """The keys and values of one layer. ``update`` keeps them until attention comes, which stores them."""

    is_sliding = False
    is_croppable = True

    def __init__(self, recipe):
        super().__init__()
        self.recipe = recipe
        self.cache = None
        self.slots = []
        self.seen = 0
        self.pending = None

    def lazy_initialization(self, key_states, value_states):
        self.is_initialized = True

    def update(self, key_states, value_states, *args, **kwargs):
        """Returns the new keys and values, which know this layer: they are handles, not all that is held."""
        if self.pending is not None:
            raise kvpack.Error("update: the keys before were never attended to; call kvpack.hf.enable for this model")
        self.is_initialized = True
        self.seen += key_states.shape[-2]
        self.pending = (key_states, value_states)
        key_states._kvpack_layer = self
        return key_states, value_states

    def attend(self, query, mask, options):
        """Stores what is pending and attends: queries ``[batch, heads, tokens, head_dim]``, outputs with the middle
        dimensions exchanged."""
        (keys, values), self.pending = self.pending, None
        batch, heads, tokens, channels = query.shape
        if self.cache is None:
            self.cache = kvpack.Cache(
                layers=1, query_heads=heads, kv_heads=keys.shape[1], head_dim=channels, sequences=batch,
                recipe=self.recipe, device=str(query.device), **options,
            )
            self.slots = list(range(batch))
        if batch != len(self.slots):
            raise kvpack.Error(f"the cache holds a batch of {len(self.slots)}, and the call has {batch} rows")
        new = _new_tokens(mask, batch, tokens)
        runs = [slot if tokens == 1 else (slot, count) for slot, count in zip(self.slots, new) if count > 0]
        rows = lambda x: torch.cat([x[row, :, tokens - count:].transpose(0, 1) for row, count in enumerate(new)])
        if not runs:
            return query.new_zeros(batch, tokens, heads, channels)
        with self.cache.begin(runs) as step:
            step.store(0, rows(keys.detach()).contiguous(), rows(values.detach()).contiguous())
            packed = step.attend(0, rows(query.detach()).contiguous())
        if all(count == tokens for count in new):
            return packed.view(batch, tokens, heads, channels)
        outputs = query.new_zeros(batch, tokens, heads, channels)
        for row, part in enumerate(packed.split(new)):
            outputs[row, tokens - new[row]:] = part
        return outputs

    def get_mask_sizes(self, query_length):
        return self.seen + query_length, 0

    def get_seq_length(self):
        return self.seen

    def get_max_length(self):
        return -1

    get_max_cache_shape = get_max_length

    def reset(self):
        for slot in self.slots:
            self.cache.clear(slot)
        self.seen, self.pending = 0, None

    def reorder_cache(self, beam_idx):
        """Row ``b`` goes on with what row ``beam_idx[b]`` holds. Beams share pages."""
        sources = [self.slots[row] for row in beam_idx.tolist()]
        if self.cache is None:
            return
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

    def batch_select_indices(self, indices):
        rows = torch.arange(len(self.slots))[indices.cpu()]
        if len(rows) != len(self.slots):
            given = f"{len(rows)} of {len(self.slots)} were selected"
            raise kvpack.Error(f"a packed cache keeps the rows of its batch: {given}")
        self.reorder_cache(rows)

    def batch_repeat_interleave(self, repeats):
        raise kvpack.Error("a packed cache keeps the rows of its batch; pass as many rows from the beginning")

    def crop(self, tokens_to_remove):
        """Drops the newest ``-tokens_to_remove`` tokens."""
        if tokens_to_remove > 0:
            raise kvpack.Error("crop: give the number of tokens to remove, as a negative number")
        for slot in self.slots if tokens_to_remove else []:
            self.cache.truncate(slot, self.cache.length(slot) + tokens_to_remove)
        self.seen += tokens_to_remove


class PackedCache(Cache):
    """A cache whose layers are packed by a recipe."""

    def __init__(self, recipe):
        _check_recipe(recipe)
        self.recipe = str(recipe)
        super().__init__(layer_class_to_replicate=lambda: PackedLayer(self.recipe))

    def memory(self):
        """Bytes of all layers: ``allocated_bytes``, ``in_use_bytes``."""
        memories = [layer.cache.memory() for layer in self.layers if layer.cache is not None]
        return {name: sum(memory[name] for memory in memories) for name in ("allocated_bytes", "in_use_bytes")}


def enable(model, recipe):
    """Lets ``model.generate`` use packed caches of a recipe. Returns the model.

    Raises ``kvpack.Error`` for models that are not listed in ``MODELS``, and for recipes that evict.
    """
    config = model.config.get_text_config(decoder=True)
    if config.model_type not in MODELS:
        raise kvpack.Error(f"model '{config.model_type}': kvpack.hf knows {', '.join(MODELS)}")
    _check_recipe(recipe)
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _mask)
    disable(model)
    model._kvpack_attention = config._attn_implementation
    model.set_attn_implementation(_NAME)
    prepare = type(model)._prepare_cache_for_generation

    def prepare_packed(self, generation_config, model_kwargs, *args, **kwargs):
        prepared = prepare(self, generation_config, model_kwargs, *args, **kwargs)
        for name in ("cache", "past_key_values"):
            if isinstance(model_kwargs.get(name), DynamicCache):
                model_kwargs[name] = PackedCache(recipe)
        return prepared

    model._prepare_cache_for_generation = types.MethodType(prepare_packed, model)
    return model


def disable(model):
    """Takes ``enable`` back. Returns the model."""
    if hasattr(model, "_kvpack_attention"):
        del model._prepare_cache_for_generation
        model.set_attn_implementation(model._kvpack_attention)
        del model._kvpack_attention
    return model


def _check_recipe(recipe):
    if kvpack.Recipe(str(recipe)).evicts:
        hint = "it evicts tokens, and here all are kept; leave out what is before the slash"
        raise kvpack.Error(f"recipe {recipe}: {hint}")
    if "layers=" in str(recipe):
        raise kvpack.Error(f"recipe '{recipe}': kvpack.hf stores all layers alike; leave out 'layers='")
    kvpack.Cache(layers=1, kv_heads=1, head_dim=64, recipe=str(recipe))


def _mask(*args, attention_mask=None, use_vmap=False, **kwargs):
    """The padding, ``[batch, tokens]`` or none: plans know the rest."""
    if use_vmap:
        raise kvpack.Error("kvpack.hf knows causal masks and sliding windows; the model asks for a mask of its own")
    return attention_mask


def _new_tokens(mask, batch, tokens):
    """How many of the newest ``tokens`` of each row are no padding."""
    if mask is None:
        return [tokens] * batch
    if mask.ndim != 2:
        raise kvpack.Error(f"kvpack.hf takes masks [batch, tokens]; the call passed one of shape {list(mask.shape)}")
    mask = mask.bool()
    if (mask[:, 1:] < mask[:, :-1]).any():
        raise kvpack.Error("kvpack.hf takes padding on the left; the mask has padding behind a token")
    return mask[:, -tokens:].sum(1).tolist()


def _attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, sliding_window=None, softcap=None,
               s_aux=None, **kwargs):
    layer = getattr(key, "_kvpack_layer", None)
    if layer is None:
        raise kvpack.Error("a forward pass of a packed model needs a packed cache: pass kvpack.hf.PackedCache(recipe)")
    if dropout:
        raise kvpack.Error("kvpack computes no dropout; call model.eval()")
    options = {"scale": scaling, "soft_cap": softcap, "windows": None if sliding_window is None else [sliding_window],
               "sinks": None if s_aux is None else [s_aux.detach().float().tolist()]}
    return layer.attend(query, attention_mask, options), None
