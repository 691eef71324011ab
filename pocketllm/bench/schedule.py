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
MAX_BLOCKS = 100_000
"""A run of as many takes a day at the least; more are a slip."""
MAX_REQUESTS = 5
MAX_ASKED = 100_000
"""Requests a slot, or runs, that somebody may ask for; more are a slip."""
SLOT_SECONDS = 1.0
"""A slot shorter than this gets more requests, if the time is there."""


SHORT_BURNIN = 0.25


@dataclass(frozen=True)
class Slot:
    """One arm measured once. `prev_arm` ran just before (also across a block's edge); None after a fresh start."""

    index: int
    superblock: int
    block: int
    position: int
    arm: str
    prev_arm: str | None
    start: int = 0
    """Which start of the arms' processes; 0 throughout where they are not started afresh."""


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


def whole_row_sets(at_least: int, k: int, starts: int = 1) -> int:
    """Smallest number of blocks ≥ at_least that is a whole number of row sets for each start.

    >>> [whole_row_sets(7, k) for k in (2, 3, 4, 5, 6)]
    [8, 12, 8, 10, 12]
    >>> [whole_row_sets(7, k, starts=5) for k in (2, 3, 4)]
    [10, 30, 20]
    """
    size = row_set_size(k) * starts
    return math.ceil(at_least / size) * size


def default_blocks(k: int, starts: int = 1) -> int:
    """About DEFAULT_BLOCKS, whole row sets, at least MIN_BLOCKS; with several starts a row set each if that is enough.

    >>> [default_blocks(k) for k in (2, 3, 4, 5, 6)]
    [12, 12, 12, 10, 12]
    >>> [default_blocks(3, starts) for starts in (1, 2, 5)]
    [12, 12, 30]
    """
    fewest = whole_row_sets(MIN_BLOCKS, k, starts)
    size = row_set_size(k)
    return fewest if starts > 1 else max(round(DEFAULT_BLOCKS / size) * size, fewest)


def order(arms: Sequence[str], blocks: int, seed: int, starts: int = 1) -> list[Slot]:
    """All slots in the order they run. `blocks` must be whole row sets for each start; labels are permuted by seed.

    >>> [slot.arm for slot in order(["base", "candidate"], blocks=2, seed=1)]
    ['base', 'candidate', 'candidate', 'base']
    """
    size = row_set_size(len(arms))
    assert blocks > 0, blocks
    assert blocks % (size * starts) == 0, (blocks, size, starts)
    blocks_a_start = blocks // starts
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
                block = superblock * size + row_number
                start = block // blocks_a_start
                # what ran before a fresh start ran in processes that are gone
                previous = slots[-1].arm if slots and slots[-1].start == start else None
                slots.append(Slot(len(slots), superblock, block, position, labels[treatment], previous, start))
    return slots


@dataclass(frozen=True)
class Costs:
    """What calibration found: seconds of one request of each arm, and of what a block takes whatever is asked of it."""

    request_s: tuple[float, ...]
    """Of points whose number of requests a slot is still to be fitted; 0 where there is no such point."""
    fixed_s: float = 0.0
    """Of a block's points with a number of their own, all arms together."""
    start_s: float = 0.0
    """Of ending and starting every arm afresh, warm-up included."""

    def seconds(self, blocks: int, requests: int, burnin: float, starts: int = 1) -> float:
        """Of a run from its first slot on: the first start has been paid for."""
        return blocks * (sum(self.request_s) * (requests + burnin) + self.fixed_s) + (starts - 1) * self.start_s

    def default_requests(self) -> int:
        """Requests a slot so that the shortest slot reaches SLOT_SECONDS, at most MAX_REQUESTS."""
        return min(MAX_REQUESTS, max(1, math.ceil(SLOT_SECONDS / max(min(self.request_s), 1e-9))))

    def minimum_s(self, requests: int | None = None, starts: int = 1) -> float:
        """The shortest run that is still a run: the fewest blocks and requests, and a short burn-in."""
        blocks = whole_row_sets(MIN_BLOCKS, len(self.request_s), starts)
        return self.seconds(blocks, requests or 1, SHORT_BURNIN, starts)

    def fit(self, seconds: float, burnin: float = 1.0, requests: int | None = None, starts: int = 1) -> "Fitted | None":
        """Most evidence that `seconds` can hold; None: not even the minimum.

        Blocks are the sample, so requests a slot (unless given) and at last the length of the burn-in give way first.
        """
        k = len(self.request_s)
        unit, minimum = row_set_size(k) * starts, whole_row_sets(MIN_BLOCKS, k, starts)
        wanted = self.default_requests() if requests is None else requests
        fewest = 1 if requests is None else requests
        shortest = min(burnin, SHORT_BURNIN)
        for count, share in [*((n, burnin) for n in range(wanted, fewest - 1, -1)), (fewest, shortest)]:
            left_s = seconds - self.seconds(0, count, share, starts)
            affordable = int(left_s / self.seconds(1, count, share)) // unit * unit
            if affordable >= minimum:
                blocks = min(affordable, whole_row_sets(MAX_BUDGET_BLOCKS, k, starts))
                return Fitted(blocks, count, share, self.seconds(blocks, count, share, starts), starts)
        return None


@dataclass(frozen=True)
class Fitted:
    """What a run will do: blocks in whole row sets, measured requests a slot, share of a burn-in, seconds needed."""

    blocks: int
    requests: int
    burnin: float
    seconds: float
    starts: int = 1
