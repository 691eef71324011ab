"""Arms × blocks → slots, balanced by position and by neighbor; pure.

A row of a Williams design is a block: every arm once. Over a row set (k rows for even k, 2k for odd k) each arm stands
in each position equally often, and each ordered pair of neighbors occurs equally often, so neither a position penalty
nor what the previous arm left behind favors anybody. Source: E. J. Williams, Aust. J. Sci. Res. A 2 (1949) 149.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT_BLOCKS = 12
MIN_BLOCKS = 7
MAX_BUDGET_BLOCKS = 48
MAX_REQUESTS = 5
SLOT_SECONDS = 1.0
"""A slot shorter than this gets more requests, if the time is there."""


SHORT_BURNIN = 0.25


@dataclass(frozen=True)
class Slot:
    """One arm measured once. `prev_arm` ran just before (also across a block's edge); None for the very first."""

    index: int
    superblock: int
    block: int
    position: int
    arm: str
    prev_arm: str | None


def williams_rows(k: int) -> list[tuple[int, ...]]:
    """A Williams design for k ≥ 2 treatments; k = 2 gives AB, BA, so that two blocks read ABBA.

    >>> williams_rows(4)
    [(0, 1, 3, 2), (1, 2, 0, 3), (2, 3, 1, 0), (3, 0, 2, 1)]
    """
    assert k >= 2, k
    first = [0, *((step + 1) // 2 if step % 2 else k - step // 2 for step in range(1, k))]
    rows = [tuple((treatment + shift) % k for treatment in first) for shift in range(k)]
    return rows if k % 2 == 0 else rows + [tuple(reversed(row)) for row in rows]


def row_set_size(k: int) -> int:
    """Blocks after which k arms are balanced."""
    return k if k % 2 == 0 else 2 * k


def whole_row_sets(at_least: int, k: int) -> int:
    """Smallest number of blocks ≥ at_least that is a whole number of row sets.

    >>> [whole_row_sets(7, k) for k in (2, 3, 4, 5, 6)]
    [8, 12, 8, 10, 12]
    """
    size = row_set_size(k)
    return math.ceil(at_least / size) * size


def default_blocks(k: int) -> int:
    """About DEFAULT_BLOCKS, whole row sets, at least MIN_BLOCKS.

    >>> [default_blocks(k) for k in (2, 3, 4, 5, 6)]
    [12, 12, 12, 10, 12]
    """
    size = row_set_size(k)
    return max(round(DEFAULT_BLOCKS / size) * size, whole_row_sets(MIN_BLOCKS, k))


def order(arms: Sequence[str], blocks: int, seed: int) -> list[Slot]:
    """All slots in the order they run. `blocks` must be whole row sets; labels are permuted by seed.

    >>> [slot.arm for slot in order(["base", "candidate"], blocks=2, seed=1)]
    ['base', 'candidate', 'candidate', 'base']
    """
    size = row_set_size(len(arms))
    assert blocks > 0, blocks
    assert blocks % size == 0, (blocks, size)
    rng = random.Random(seed)
    rows = williams_rows(len(arms))
    labels = rng.sample(list(arms), len(arms))
    slots: list[Slot] = []
    for superblock in range(blocks // size):
        if len(arms) > 2 and superblock:
            # a new permutation each row set; two arms keep their one flip, or ABBA would not repeat
            labels = rng.sample(list(arms), len(arms))
        for row_number, row in enumerate(rows):
            for position, treatment in enumerate(row):
                previous = slots[-1].arm if slots else None
                block = superblock * size + row_number
                slots.append(Slot(len(slots), superblock, block, position, labels[treatment], previous))
    return slots


@dataclass(frozen=True)
class Fitted:
    """What a run will do: blocks in whole row sets, measured requests a slot, share of a burn-in, seconds needed."""

    blocks: int
    requests: int
    burnin: float
    seconds: float


def seconds_needed(request_s: Sequence[float], blocks: int, requests: int, burnin: float) -> float:
    """Seconds of `blocks` blocks when one request of each arm takes `request_s`."""
    return blocks * sum(request_s) * (requests + burnin)


def default_requests(request_s: Sequence[float]) -> int:
    """Requests a slot so that the shortest slot reaches SLOT_SECONDS, at most MAX_REQUESTS."""
    return min(MAX_REQUESTS, max(1, math.ceil(SLOT_SECONDS / max(min(request_s), 1e-9))))


def fit_budget(
    request_s: Sequence[float], seconds: float, burnin: float = 1.0, requests: int | None = None
) -> Fitted | None:
    """Most evidence that `seconds` can hold, given one request's time for each arm; None: not even the minimum.

    Blocks are the sample, so requests a slot (unless given) and at last the length of the burn-in give way first.
    """
    k = len(request_s)
    minimum = whole_row_sets(MIN_BLOCKS, k)
    wanted = default_requests(request_s) if requests is None else requests
    fewest = 1 if requests is None else requests
    shortest = min(burnin, SHORT_BURNIN)
    for count, share in [*((n, burnin) for n in range(wanted, fewest - 1, -1)), (fewest, shortest)]:
        block_s = seconds_needed(request_s, 1, count, share)
        affordable = int(seconds / block_s) // row_set_size(k) * row_set_size(k)
        if affordable >= minimum:
            blocks = min(affordable, whole_row_sets(MAX_BUDGET_BLOCKS, k))
            return Fitted(blocks, count, share, blocks * block_s)
    return None


def minimum_seconds(request_s: Sequence[float], requests: int | None = None) -> float:
    """The shortest run that is still a run: the fewest blocks and requests, and a short burn-in."""
    return seconds_needed(request_s, whole_row_sets(MIN_BLOCKS, len(request_s)), requests or 1, SHORT_BURNIN)
