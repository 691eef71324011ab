"""How tokens are drawn where their logits are: what the host says of each row, and what comes back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pocketllm.engine.backends.api.attention import ForwardBatch
from pocketllm.engine.backends.api.ops import Tensor

NOT_FINITE, FORBIDDEN = -1, -2
"""Token ids of rows that name no distribution: in the logits as the model gave them, or only once they were edited."""


@dataclass(frozen=True)
class Edit:
    """A change of single logits."""

    ids: npt.NDArray[np.int64]
    """[n], each once."""
    values: npt.NDArray[np.float32]
    """[n]"""
    divides: bool = False
    """False: values are added. True: what is above 0 is divided by its value, the rest multiplied."""

    def apply(self, logits: npt.NDArray[np.float32]) -> None:
        """Change a row in place. logits: [vocab]."""
        if self.divides:
            some = logits[self.ids]
            logits[self.ids] = np.where(some > 0, some / self.values, some * self.values)
        else:
            with np.errstate(invalid="ignore"):  # of what is not finite; whoever draws from it refuses it
                logits[self.ids] += self.values


@dataclass(frozen=True)
class Draw:
    """How one row's token is drawn; in the order of the fields: allowed tokens, edits, temperature, filters."""

    row: int
    """Of the step's logits; each row is drawn from once at most."""
    allowed: npt.NDArray[np.bool_] | None = None
    """Tokens that may be drawn, others being forbidden; of a vocabulary as long or longer. None: all."""
    edits: Sequence[Edit] = ()
    """One after another."""
    temperature: float = 0.0
    """0: the likeliest, the lowest id among equals."""
    top_k: int = 0
    """0: off. What ties with the last stays."""
    top_p: float = 1.0
    min_p: float = 0.0
    share: float = 0.0
    """0 ≤ share < 1: the token is the first, by id, up to which more than this share of what is left lies."""
    num_logprobs: int | None = None
    """Likeliest tokens to report beside the drawn one, of the logits as the model gave them; None: nothing."""


@dataclass(frozen=True)
class Drawn:
    """One row's token, or NOT_FINITE or FORBIDDEN, and natural log-probabilities where they were asked for."""

    token_id: int
    logprob: float = 0.0
    top_ids: tuple[int, ...] = ()
    """Likeliest first, the lower id first among equals."""
    top_logprobs: tuple[float, ...] = ()


class PendingDraws(Protocol):
    """Tokens that are on their way."""

    def wait(self) -> Sequence[Drawn]:
        """One for each draw, in their order. Raises what the device failed with."""


class Drawer(Protocol):
    """A backend's part of sampling, for the steps of one captured forward. Calls do not wait for the device.

    A batch that is launched later may have `-1 - row` among its input ids: the token that was last drawn for that row.
    """

    def draw(self, logits: Tensor, draws: Sequence[Draw]) -> PendingDraws:
        """Draw a token for some rows of a step's logits: [rows, vocab], as `Ops.project` gave them."""

    def capped(self, logits: Tensor, cap: float) -> Tensor:
        """cap · tanh(logits / cap)."""


def drawer_of(captured: Callable[[ForwardBatch], Tensor]) -> Drawer | None:
    """What draws from the logits of a forward that `Ops.capture` returned, its attribute `drawer`; None: the host."""
    drawer: Drawer | None = getattr(captured, "drawer", None)
    return drawer
