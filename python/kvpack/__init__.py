"""Packed key-value caches for transformers, and attention to the packed form.

Tensors are those of any library with ``__dlpack__``, ``__array_interface__`` or ``data_ptr``: NumPy, PyTorch, JAX.
Elements are float32, float16 or bfloat16. Keys and values have the shape ``[tokens, kv_heads, head_dim]``, queries and
outputs ``[rows, query_heads, head_dim]``.
"""

from ._kvpack import (
    Cache,
    Error,
    NoRoom,
    Packed,
    Recipe,
    Step,
    Swapped,
    TensorError,
    __version__,
    attend,
    attend_states,
    dequantize,
    merge,
    quantize,
    recipes,
)
from ._select import select

__all__ = [
    "Cache",
    "Error",
    "NoRoom",
    "Packed",
    "Recipe",
    "Step",
    "Swapped",
    "TensorError",
    "__version__",
    "attend",
    "attend_states",
    "dequantize",
    "merge",
    "quantize",
    "recipes",
    "select",
]
