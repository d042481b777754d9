"""Attention in float64 over what a cache holds."""

import numpy as np


def held(cache, layer, sequence):
    """Keys and values ``[kv_heads, tokens, head_dim]`` and positions, in the order of the spans."""
    spans = cache.dequantize(layer, sequence)
    keys = np.concatenate([span["keys"] for span in spans], axis=1).astype(np.float64)
    values = np.concatenate([span["values"] for span in spans], axis=1).astype(np.float64)
    return keys, values, np.concatenate([span["positions"] for span in spans])


def attention(queries, keys, values, sees, scale=None, cap=None, sinks=None):
    """Outputs ``[rows, query_heads, head_dim]`` and log-sum-exps. ``sees`` is a mask ``[rows, tokens]``."""
    rows, heads, channels = queries.shape
    group = heads // keys.shape[0]
    scale = 1 / np.sqrt(channels) if scale is None else scale
    outputs, lses = np.zeros((rows, heads, channels)), np.zeros((rows, heads))
    for head in range(heads):
        scores = queries[:, head].astype(np.float64) @ keys[head // group].T * scale
        if cap is not None:
            scores = cap * np.tanh(scores / cap)
        scores = np.where(sees, scores, -np.inf)
        largest = scores.max(axis=1, keepdims=True)
        if sinks is not None:
            largest = np.maximum(largest, sinks[head])
        weights = np.exp(scores - largest)
        total = weights.sum(axis=1, keepdims=True)
        if sinks is not None:
            total = total + np.exp(sinks[head] - largest)
        outputs[:, head] = weights @ values[head // group] / total
        lses[:, head] = (largest + np.log(total))[:, 0]
    return outputs, lses


def error(given, wanted):
    """Relative error: the norm of the difference by that of what is wanted."""
    given = np.asarray(given, dtype=np.float64)
    return float(np.linalg.norm(given - wanted) / np.linalg.norm(wanted))
