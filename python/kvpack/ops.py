"""Operators of PyTorch, which ``torch.compile`` keeps in its graphs: ``torch.ops.kvpack``.

A graph holds numbers and tensors, and no object of Python. So the operators of a step take the number of a cache, and
work on the step that ``Layers.begin`` opened::

    layers = kvpack.ops.Layers(cache)
    compiled = torch.compile(model)  # calls layers.store_attend(layer, keys, values, queries) in every layer
    with layers.begin([0]):
        compiled(token)

Each of them changes the cache. They say so of a tensor ``order`` of one element, which they do not touch: it keeps them
in their order, and none is left out because nobody reads its result. ``round_trip`` and ``attend_packed`` change
nothing, and run on the CPU.
"""

import itertools
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch

import kvpack

_numbers = itertools.count(1)
_layers: "weakref.WeakValueDictionary[int, Layers]" = weakref.WeakValueDictionary()

# A graph of CUDA that holds them has to be captured again where steps of a cache say so, which Inductor does not know.
_TAGS = [tag] if (tag := getattr(torch.Tag, "cudagraph_unsafe", None)) is not None else []


class _Step(Protocol):
    def store(self, layer: int, keys: Any, values: Any) -> None: ...
    def attend(self, layer: int, queries: Any) -> Any: ...
    def store_attend(self, layer: int, keys: Any, values: Any, queries: Any) -> Any: ...


class Layers:
    """The layers of a cache for functions that are compiled. Keep it as long as they are called."""

    def __init__(self, cache: kvpack.Cache, device: torch.device | str = "cpu") -> None:
        """``device`` is that of the cache."""
        self.cache = cache
        self.number = next(_numbers)
        self.order = torch.zeros(1, dtype=torch.int8, device=device)
        self.step: _Step | None = None
        _layers[self.number] = self

    def begin(self, runs: Sequence[Any]) -> kvpack.Step:
        """Opens a step, as ``Cache.begin``, on which ``store``, ``attend`` and ``store_attend`` work from now on."""
        step = self.cache.begin(runs)
        self.step = step
        return step

    def begin_attend(self, runs: Sequence[tuple[int, int]]) -> kvpack.Step:
        """Opens a step that stores nothing, as ``Cache.begin_attend``."""
        step = self.cache.begin_attend(runs)
        self.step = step
        return step

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """``Step.store`` of the open step."""
        torch.ops.kvpack.store(self.order, keys, values, self.number, layer)

    def attend(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """``Step.attend`` of the open step."""
        return torch.ops.kvpack.attend(self.order, queries, self.number, layer)  # type: ignore[no-any-return]

    def store_attend(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, queries: torch.Tensor
    ) -> torch.Tensor:
        """``Step.store_attend`` of the open step."""
        op = torch.ops.kvpack.store_attend
        return op(self.order, keys, values, queries, self.number, layer)  # type: ignore[no-any-return]


def _step_of(number: int) -> _Step:
    layers = _layers.get(number)
    if layers is None:
        raise kvpack.Error(f"cache {number}: its kvpack.ops.Layers is gone; keep it as long as the function is called")
    if layers.step is None:
        raise kvpack.Error(f"cache {number}: no step is open; call the function between Layers.begin and commit")
    return layers.step


@torch.library.custom_op("kvpack::store", mutates_args=("order",), tags=_TAGS)
def _store(order: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, cache: int, layer: int) -> None:
    _step_of(cache).store(layer, keys.contiguous(), values.contiguous())


@_store.register_fake
def _(order: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, cache: int, layer: int) -> None:
    _check_rows(keys, values)


@torch.library.custom_op("kvpack::attend", mutates_args=("order",), tags=_TAGS)
def _attend(order: torch.Tensor, queries: torch.Tensor, cache: int, layer: int) -> torch.Tensor:
    return _step_of(cache).attend(layer, queries.contiguous())  # type: ignore[no-any-return]


@_attend.register_fake
def _(order: torch.Tensor, queries: torch.Tensor, cache: int, layer: int) -> torch.Tensor:
    return queries.new_empty(queries.shape)


@torch.library.custom_op("kvpack::store_attend", mutates_args=("order",), tags=_TAGS)
def _store_attend(
    order: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, queries: torch.Tensor, cache: int, layer: int
) -> torch.Tensor:
    tensors = (keys.contiguous(), values.contiguous(), queries.contiguous())
    return _step_of(cache).store_attend(layer, *tensors)  # type: ignore[no-any-return]


@_store_attend.register_fake
def _(
    order: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, queries: torch.Tensor, cache: int, layer: int
) -> torch.Tensor:
    _check_rows(keys, values)
    return queries.new_empty(queries.shape)


@torch.library.custom_op("kvpack::round_trip", mutates_args=(), device_types="cpu")
def round_trip(keys: torch.Tensor, values: torch.Tensor, recipe: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values ``[tokens, kv_heads, head_dim]`` as a recipe gives them back: packed and unpacked, float32."""
    packed = kvpack.quantize(keys, values, recipe)
    back = [torch.from_numpy(rows).transpose(0, 1).contiguous() for rows in kvpack.dequantize(packed)]
    return back[0], back[1]


@round_trip.register_fake
def _(keys: torch.Tensor, values: torch.Tensor, recipe: str) -> tuple[torch.Tensor, torch.Tensor]:
    _check_rows(keys, values)
    return keys.new_empty(keys.shape, dtype=torch.float32), keys.new_empty(keys.shape, dtype=torch.float32)


@torch.library.custom_op("kvpack::attend_packed", mutates_args=(), device_types="cpu")
def attend_packed(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, recipe: str, visible: str = "all"
) -> torch.Tensor:
    """Attention of queries ``[rows, query_heads, head_dim]`` to keys and values that a recipe packs. ``visible`` is
    ``"all"`` or ``"causal"``."""
    packed = kvpack.quantize(keys, values, recipe, query_heads=queries.shape[1])
    return kvpack.attend(packed, queries.contiguous(), visible)  # type: ignore[arg-type]


@attend_packed.register_fake
def _(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, recipe: str, visible: str = "all"
) -> torch.Tensor:
    _check_rows(keys, values)
    return queries.new_empty(queries.shape)


def _check_rows(keys: torch.Tensor, values: torch.Tensor) -> None:
    torch._check(keys.ndim == 3 and values.ndim == 3, lambda: "keys and values: [tokens, kv_heads, head_dim]")
    torch._check(keys.shape[0] == values.shape[0], lambda: "values: as many tokens as the keys")
