"""From logits to the tokens that may be drawn and their probabilities; numpy, one row at a time.

Order: temperature, top-k, top-p, min-p; each filter sees what the one before left. This is the order of
transformers' warpers and of SGLang's sampler; vLLM applies min-p before top-k, and llama.cpp's default chain puts the
temperature last, so that its filters see the distribution at temperature 1.
"""

import numpy as np
import numpy.typing as npt

from pocketllm.engine.lifecycle.sampling.params import SamplingParams

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

NUCLEUS_GUESS = 1024
"""Most nuclei are smaller than this; only a larger one pays for sorting the whole vocabulary."""


def candidates(logits: npt.NDArray[np.float32], params: SamplingParams) -> tuple[Int64Array, Float64Array]:
    """Token ids that may be drawn, ascending, and their probabilities, which sum to 1. logits: [vocab], finite."""
    weights = np.exp(scaled(logits, params.temperature))
    ids = top_k(weights, params.top_k)
    ids = top_p(ids, weights[ids], params.top_p)
    ids = min_p(ids, weights[ids], params.min_p)
    ids = ids[weights[ids] > 0.0]  # what cannot be drawn is no candidate, though a tie at zero may have kept it
    kept = weights[ids]
    return ids, kept / kept.sum()


def scaled(logits: npt.NDArray[np.float32], temperature: float) -> Float64Array:
    """Logits over temperature, less their maximum, so that exp cannot overflow."""
    values = logits.astype(np.float64)
    values -= values.max()
    values /= temperature
    return values


def top_k(weights: Float64Array, k: int) -> Int64Array:
    """Ids of the k largest weights, ascending; what ties with the k-th stays too. k ≤ 0 or ≥ the vocabulary: all."""
    if k <= 0 or k >= len(weights):
        return np.arange(len(weights))
    smallest = np.partition(weights, len(weights) - k)[len(weights) - k]
    return np.flatnonzero(weights >= smallest)


def top_p(ids: Int64Array, weights: Float64Array, p: float) -> Int64Array:
    """The fewest ids, heaviest first and the lower id first among equals, whose weights reach p of the total."""
    if p >= 1.0:
        return ids
    wanted = p * weights.sum()
    descending = largest(weights, NUCLEUS_GUESS)
    if descending.sum() < wanted:
        descending = largest(weights, len(weights))
    # values are sorted, not places: a stable argsort costs three times as much, and only ties at the edge need ids
    count = min(int(np.searchsorted(np.cumsum(descending), wanted)) + 1, len(descending))
    above = weights > descending[count - 1]
    ties = np.flatnonzero(weights == descending[count - 1])[: count - int(above.sum())]
    above[ties] = True
    nucleus: Int64Array = ids[above]
    return nucleus


def largest(weights: Float64Array, count: int) -> Float64Array:
    """The `count` largest weights, descending."""
    if count < len(weights):
        weights = np.partition(weights, len(weights) - count)[len(weights) - count :]
    return np.sort(weights)[::-1]


def min_p(ids: Int64Array, weights: Float64Array, p: float) -> Int64Array:
    """Ids whose weight is at least p times the largest (Nguyen et al. 2024)."""
    return ids if p <= 0.0 else ids[weights >= p * weights.max()]
