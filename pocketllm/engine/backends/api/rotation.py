"""A rotation of activations that a checkpoint's matrices expect on their input."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Hadamard:
    """x ↦ H(signs · x) / √block within each run of `block` values; H: Sylvester's Walsh-Hadamard matrix of that size.

    It is orthogonal, and its inverse is y ↦ signs · H(y) / √block (Ashkboos et al. 2024, arXiv 2404.00456).
    """

    block: int
    """A power of two that divides the width."""
    signs: Any
    """[width] of 1 and -1."""
