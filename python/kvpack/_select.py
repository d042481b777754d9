"""Tokens that scores choose."""

from ._kvpack import TensorError


def select(scores, keep):
    """The tokens of the highest scores, for ``Cache.keep``: lists ``[layer][kv_head]`` in the order of the tokens.

    ``scores`` has the shape ``[layers, kv_heads, tokens]`` and is of any library. Of tokens with the same score the
    first is chosen. ``keep`` is their number, or the share of the tokens if it is a float: 1.0 is all of them. Set
    scores to infinity where tokens have to stay: the first, the newest. There may be no more of them than are kept.
    """
    import numpy  # takes as long to import as all of kvpack

    if hasattr(scores, "detach"):
        scores = scores.detach().float().cpu().numpy()
    # Integers without a sign would wrap where they are negated.
    scores = numpy.asarray(scores, dtype=numpy.float64)
    if scores.ndim != 3 or scores.shape[2] == 0:
        raise TensorError(f"scores: their shape is {list(scores.shape)}; it must be [layers, kv_heads, tokens]")
    if numpy.isnan(scores).any():
        raise TensorError("scores: some are NaN; every token needs a number")
    tokens = scores.shape[2]
    share = isinstance(keep, float) and 0 < keep <= 1
    count = max(1, round(keep * tokens)) if share else keep
    if isinstance(keep, bool) or count != int(count) or not 1 <= count <= tokens:
        raise ValueError(f"keep {keep}: it must be a number of tokens from 1 to {tokens}, or a share from 0.0 to 1.0")
    stay = int((scores == numpy.inf).sum(axis=2).max(initial=0))
    if stay > count:
        raise ValueError(f"keep {keep}: that is {count} tokens; a head has {stay} of infinite score, which must stay")
    best = numpy.argsort(-scores, axis=2, kind="stable")[:, :, : int(count)]
    return numpy.sort(best, axis=2).tolist()
