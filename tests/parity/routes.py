"""Where a mixture of experts is undecided: at a near tie of its router, rounding sends a token to another expert.

What comes out then is no rounding error but another computation, and another one at the next rounding, too.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.engine.backends.api.mixture import BoundedExperts, Experts, Gating
from pocketllm.engine.models.blocks import FLOAT_TYPES
from tests.parity.drive import Driver, chunks

TIE = 0.005
"""A router's lead of the last expert taken over the first left out, in the scores that choose: up to it, a tie."""

MIN_DECIDED = 0.5
"""The share of positions that must be left: what compares fewer proves too little."""


class Watched:
    """A backend's operations; `leads` gathers each mixture's lead for each token."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops
        self.leads: list[npt.NDArray[np.float32]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def mixture(self, x: Any, experts: Experts) -> Any:
        self._watch(x, experts)
        return self._ops.mixture(x, experts)

    def bounded_mixture(self, x: Any, experts: BoundedExperts) -> Any:
        self._watch(x, experts.experts)
        return self._ops.bounded_mixture(x, experts)

    def _watch(self, x: Any, experts: Experts) -> None:
        routing = experts.routing
        logits = self._ops.to_numpy(self._ops.project(x, experts.router)[0])
        powers = np.exp(logits - logits.max(-1, keepdims=True))
        is_softmax = routing.gating is Gating.SOFTMAX
        scores = powers / powers.sum(-1, keepdims=True) if is_softmax else 1 / (1 + np.exp(-logits))
        ranks = -np.sort(-(scores if routing.bias is None else scores + np.asarray(routing.bias)), axis=-1)
        if routing.num_used < ranks.shape[-1]:
            self.leads.append(ranks[:, routing.num_used - 1] - ranks[:, routing.num_used])


def decided(path: Path, ids: Sequence[int]) -> npt.NDArray[np.bool_]:
    """For each position, whether no router of the reference backend is at a tie there; of files without packed experts
    every one, as their rows are not rounded.

    Groups are not looked at, nor mixtures that are operations of their own: no position is left out for those. Raises
    ValueError where less than half of the positions would be left.
    """
    driver = Driver(path)
    types = {tensor.quant_type for name, tensor in driver.checkpoint.tensors.items() if "_exps." in name}
    if types <= FLOAT_TYPES:
        return np.ones(len(ids), bool)
    watched = Watched(driver.ops)
    driver.model = replace(driver.model, ops=watched)
    driver.run([ids], chunks(len(ids), len(ids)))
    kept = np.min([np.full(len(ids), np.inf), *watched.leads], axis=0) > TIE
    if kept.mean() < MIN_DECIDED:
        raise ValueError(f"{path.name}: routers are at a tie at {np.sum(~kept)} of {len(ids)} positions; take others")
    return kept
