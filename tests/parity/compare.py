"""How far two implementations' logits are apart, in the figures that a parity record keeps."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.floating]


def log_softmax(logits: FloatArray) -> npt.NDArray[np.float64]:
    """Natural log-probabilities over the last axis, in float64."""
    values = logits.astype(np.float64)
    shifted = values - values.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


@dataclass
class Difference:
    """Figures over positions, gathered one position (or several) at a time so that no vocabulary is kept.

    max_error and mean_error: absolute differences of the values handed in; kl: mean of KL(oracle ‖ ours) in nats;
    top1: share of positions with the same most likely token; widest_flip: the oracle's largest lead of its most likely
    token over its second, in nats, among the positions where ours is another one. A flip at a small lead is a tie.
    """

    n: int = 0
    max_error: float = 0.0
    widest_flip: float = 0.0
    _sums: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("absolute", "square", "size", "kl", "same"), 0.0)
    )
    _values: int = 0

    def add(self, ours: FloatArray, oracle: FloatArray, same: int | None = None, num_told: int | None = None) -> None:
        """Compare some positions: [positions, vocab] logits or log-probabilities each.

        same: at how many of them the likeliest token is the same, where these values alone do not tell; num_told:
        how many leading values stand for a token each, and so have an error.
        """
        ours, oracle = ours.astype(np.float64), oracle.astype(np.float64)
        error = np.abs(ours - oracle)[:, :num_told]
        mine, theirs = log_softmax(ours), log_softmax(oracle)
        self.n += len(ours)
        self.max_error = max(self.max_error, float(error.max()))
        self._values += error.size
        self._sums["absolute"] += float(error.sum())
        self._sums["square"] += float((error**2).sum())
        self._sums["size"] += float((oracle[:, :num_told] ** 2).sum())
        self._sums["kl"] += float((np.exp(theirs) * (theirs - mine)).sum())
        flipped = ours.argmax(-1) != oracle.argmax(-1)
        if flipped.any():
            first_two = -np.partition(-oracle[flipped], 1, axis=-1)[:, :2]
            self.widest_flip = max(self.widest_flip, float((first_two[:, 0] - first_two[:, 1]).max()))
        self._sums["same"] += int((ours.argmax(-1) == oracle.argmax(-1)).sum()) if same is None else same

    @property
    def nmse(self) -> float:
        return self._sums["square"] / self._sums["size"]

    @property
    def kl(self) -> float:
        return max(0.0, self._sums["kl"] / self.n)

    @property
    def top1(self) -> float:
        return self._sums["same"] / self.n

    def figures(self) -> dict[str, float | int]:
        """Columns of a parity row."""
        return {
            "n": self.n,
            "max_error": self.max_error,
            "mean_error": self._sums["absolute"] / self._values,
            "nmse": self.nmse,
            "top1": self.top1,
            "kl": self.kl,
        }


def compare(pairs: Iterable[tuple[FloatArray, FloatArray]]) -> Difference:
    """Difference over (ours, oracle) pairs."""
    difference = Difference()
    for ours, oracle in pairs:
        difference.add(ours, oracle)
    return difference


def in_pieces(ours: FloatArray, oracle: FloatArray, rows: int = 32) -> Iterator[tuple[FloatArray, FloatArray]]:
    """The same positions of both, a few at a time."""
    assert ours.shape == oracle.shape, (ours.shape, oracle.shape)
    for at in range(0, len(ours), rows):
        yield ours[at : at + rows], oracle[at : at + rows]


def ids_sha256(input_ids: npt.NDArray[np.integer]) -> str:
    """Digest of the tokens that were asked about."""
    return hashlib.sha256(input_ids.astype("<i4").tobytes()).hexdigest()
