"""Mirostat v2: keeps the surprise of drawn tokens near a target (Basu et al. 2020); llama.cpp's semantics.

After the temperature, tokens whose surprise -log2 p is above μ are left out (never the likeliest), one is drawn from
the rest, and μ moves against the error: μ -= eta · (surprise of the drawn token among the rest - tau). μ begins at
2 · tau. It stands in for the other filters.
"""

import numpy as np
import numpy.typing as npt

from pocketllm.engine.lifecycle.sampling.params import SamplingParams

Weights = npt.NDArray[np.float32]


class Mirostat:
    """One request's state between its draws."""

    def __init__(self, params: SamplingParams) -> None:
        self._tau = params.mirostat_tau
        self._eta = params.mirostat_eta
        self.mu = 2 * params.mirostat_tau

    def keep(self, weights: Weights) -> npt.NDArray[np.int64]:
        """Places that may be drawn from, ascending. weights: [vocab], in proportion to probabilities, the largest 1."""
        # p >= 2^-mu, without a logarithm of each
        least = 2.0**-self.mu * float(weights.sum(dtype=np.float64))
        return np.flatnonzero(weights >= min(least, float(weights.max())))

    def drawn(self, weight: float, total: float) -> None:
        """A token of this weight was drawn from kept ones of this total weight."""
        self.mu -= self._eta * (-float(np.log2(weight / total)) - self._tau)
