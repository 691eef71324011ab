"""From logits to the tokens that may be drawn and their weights; numpy, one row at a time.

Order: temperature, top-k, top-p, min-p, typical-p, XTC; each filter sees what the one before left. This is the order of
transformers' warpers and, as far as they go, of SGLang's sampler; vLLM applies min-p before top-k and has no typical-p,
and llama.cpp's default chain puts the temperature last, so that its filters see the distribution at temperature 1.

Whole rows are only scanned, never gathered or sorted, as long as the answer does not depend on it. Weights are float32,
as in vLLM and SGLang; what is summed over a row is summed in pairs or in float64.
"""

from math import log

import numpy as np
import numpy.typing as npt

from pocketllm.engine.lifecycle.sampling.params import SamplingParams

Float32Array = npt.NDArray[np.float32]
Int64Array = npt.NDArray[np.int64]

MIN_COLUMNS = 512
NUCLEUS_GUESS = 1024
"""Most nuclei are smaller than this; only a larger one pays for sorting the whole vocabulary."""


def candidates(logits: Float32Array, params: SamplingParams) -> tuple[Int64Array | None, Float32Array]:
    """Token ids that may be drawn, ascending (None: every token), and their weights, in proportion to probabilities.

    logits: [vocab], finite or -inf. The likeliest token has weight 1, and a weight may be 0.
    """
    top = float(logits.max())
    ids = prefiltered(logits, top, params)
    weights = relative_weights(logits if ids is None else logits[ids], top, params.temperature)
    for keep, threshold, is_off in (
        (top_p, params.top_p, params.top_p >= 1.0),
        (min_p, params.min_p, params.min_p <= 0.0),
        (typical_p, params.typical_p, params.typical_p >= 1.0),
    ):
        if not is_off:
            kept = keep(weights, threshold)
            ids, weights = kept if ids is None else ids[kept], weights[kept]
    return ids, weights


def prefiltered(logits: Float32Array, top: float, params: SamplingParams) -> Int64Array | None:
    """What top-k leaves, or, where it is off, all that min-p alone may leave: found without a single exponential."""
    if 0 < params.top_k < len(logits):
        return top_k(logits, params.top_k)
    if params.min_p > 0.0 and params.top_p >= 1.0:
        edge = top + params.temperature * log(params.min_p)
        slack = 1e-6 * (abs(top) + params.temperature)  # a little more than needed: min_p itself decides
        return np.flatnonzero(logits >= edge - slack)
    return None


def relative_weights(logits: Float32Array, top: float, temperature: float) -> Float32Array:
    """exp((logits - top) / temperature); top is the largest, so that exp cannot overflow."""
    with np.errstate(over="ignore"):  # far below the largest: -inf, whose weight is 0
        values: Float32Array = logits - np.float32(top)
        if temperature != 1.0:
            values /= np.float32(temperature)
    # in place: a second array of this size would go back to the system each time, and cost its page faults
    np.exp(values, out=values)
    return values


def top_k(values: Float32Array, k: int) -> Int64Array:
    """Places of the k largest values, ascending; what ties with the k-th stays too. 0 < k ≤ their number."""
    places = reaching(values, k)
    some = values[places]
    kept: Int64Array = places[some >= np.partition(some, len(some) - k)[len(some) - k]]
    return kept


def reaching(values: Float32Array, count: int) -> Int64Array:
    """Places, ascending, that hold the `count` largest values and few others."""
    columns = max(MIN_COLUMNS, 2 * count)
    rows = len(values) // columns
    if rows < 4:
        return np.arange(len(values))
    # as many columns as reach a value hold one place each that does: half the time of partitioning a vocabulary
    maxima = values[: rows * columns].reshape(rows, columns).max(axis=0)
    return np.flatnonzero(values >= np.partition(maxima, columns - count)[columns - count])


def top_p(weights: Float32Array, p: float) -> Int64Array:
    """The fewest places, heaviest first and the lower place first among equals, whose weights reach p of the total."""
    wanted = p * weights.sum()
    descending = largest(weights, NUCLEUS_GUESS)
    if descending.sum() < wanted:
        descending = largest(weights, len(weights))
    # values are sorted, not places: a stable argsort costs three times as much, and only ties at the edge need places
    running = np.cumsum(descending, dtype=np.float64)
    count = min(int(np.searchsorted(running, wanted)) + 1, len(descending))
    lightest = descending[count - 1]
    places = np.flatnonzero(weights >= lightest)
    if len(places) > count:
        num_ties = count - int((descending > lightest).sum())
        ties = places[weights[places] == lightest]
        places = np.setdiff1d(places, ties[num_ties:], assume_unique=True)
    return places


def largest(values: Float32Array, count: int) -> Float32Array:
    """The `count` largest values, descending."""
    if count < len(values):
        some = values[reaching(values, count)]
        values = np.partition(some, len(some) - count)[len(some) - count :]
    return np.sort(values)[::-1]


def min_p(weights: Float32Array, p: float) -> Int64Array:
    """Places whose weight is at least p times the largest (Nguyen et al. 2024)."""
    return np.flatnonzero(weights >= p * weights.max())


def typical_p(weights: Float32Array, p: float) -> Int64Array:
    """The fewest places whose weights reach p of the total, those first whose surprise is nearest to the entropy.

    Locally typical sampling (Meister et al. 2022), as in transformers and llama.cpp; what ties with the last stays.
    """
    probabilities = weights.astype(np.float64) / weights.sum(dtype=np.float64)
    with np.errstate(divide="ignore"):
        surprise = -np.log(probabilities)
    is_possible = probabilities > 0
    entropy = (probabilities[is_possible] * surprise[is_possible]).sum()
    distance = np.abs(surprise - entropy)
    order = np.argsort(distance, kind="stable")
    count = min(int(np.searchsorted(np.cumsum(probabilities[order]), p)) + 1, len(order))
    return np.flatnonzero(distance <= distance[order[count - 1]])


def without_top_choices(weights: Float32Array, threshold: float) -> Int64Array:
    """XTC, "exclude top choices" (P. E. Weidmann 2024), as llama.cpp does it: of places at or above a probability of
    `threshold`, when there are two or more, only the lightest stays, beside all below; the higher place among equals.
    """
    reaching_it = np.flatnonzero(weights >= threshold * weights.sum(dtype=np.float64))
    if len(reaching_it) < 2 or threshold > 0.5:
        return np.arange(len(weights))
    lightest = reaching_it[np.argsort(-weights[reaching_it], kind="stable")[-1]]
    return np.setdiff1d(np.arange(len(weights)), reaching_it[reaching_it != lightest], assume_unique=True)
