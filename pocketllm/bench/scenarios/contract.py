"""What a scenario says: how long its prompts and answers are, and which metrics carry the verdict."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Scenario:
    """Lengths in tokens; `primary` metrics are judged, `also` metrics are shown without a word."""

    name: str
    about: str
    n_prompt: int
    n_out: int
    primary: tuple[str, ...]
    also: tuple[str, ...] = ()
    burnin: float = 1.0
    """Length of the burn-in request that begins each slot, as a share of a measured one."""
