"""Paired log-ratios and what can be said of them; pure numpy, scipy's special functions imported late.

z = ln(seconds per token) of a slot; d = z_arm − z_base of a block. A block is one observation, or a start of the arms'
processes where each arm has its own; a request or a token is not.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pocketllm.bench.schedule import Slot, whole_row_sets

Array = npt.NDArray[np.float64]

LEVEL = 0.95
NULL_LEVEL = 0.99
POWER = 0.80
MODIFIED_Z = 3.5
MIN_RESIDUAL_DF = 4
MIN_SIGNED_RANK = 7
MAX_CONDITION = 10.0


@dataclass(frozen=True)
class Design:
    """Regressors of one contrast, one row a block: intercept, position difference, perhaps predecessor."""

    matrix: Array
    has_predecessor: bool


@dataclass(frozen=True)
class Effect:
    """A coefficient and its standard error."""

    size: Array
    se: Array


@dataclass(frozen=True)
class Fit:
    """θ̂ = ln(time ratio) of one contrast with its own df; `n` observations (blocks, or starts), whose sd is `sd`.

    `position` is the effect of standing one slot later, `predecessor` that of following this arm rather than another,
    both on `order_df`; None where it cannot be told. Arrays are scalars, or run over simulated runs.
    """

    estimate: Array
    se: Array
    df: int
    n: int
    sd: Array
    position: Effect | None
    predecessor: Effect | None
    order_df: int
    blocks: int
    unit: str = "block"
    """What one observation is: `block` or `start`."""

    def interval(self, level: float = LEVEL) -> tuple[Array, Array]:
        """Two-sided t interval of ln(time ratio)."""
        half = t_quantile(0.5 + level / 2, self.df) * self.se
        return self.estimate - half, self.estimate + half

    @property
    def p_value(self) -> Array:
        """Two-sided p of θ = 0."""
        return two_sided_p(self.estimate, self.se, self.df)


def t_quantile(probability: float, df: int) -> float:
    """Quantile of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(df, probability))


def two_sided_p(estimate: Array, se: Array, df: int) -> Array:
    """Two-sided p of an estimate under t; an estimate without any scatter has p = 0, unless it is 0 itself."""
    from scipy.special import stdtr

    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(se > 0, np.abs(estimate) / se, np.where(np.abs(estimate) > 0, np.inf, 0.0))
    return np.asarray(2.0 * stdtr(df, -ratio), dtype=np.float64)


def make_design(slots: Sequence[Slot], arm: str, baseline: str, blocks: Sequence[int]) -> Design:
    """Regressors for `arm` against `baseline` over the given (valid) blocks of a schedule.

    The predecessor column is left out where it is constant, badly conditioned, or leaves too few degrees of freedom;
    the position column where every block has the same one.
    """
    place = {(slot.block, slot.arm): slot for slot in slots}
    rows = []
    for block in blocks:
        mine, theirs = place[block, arm], place[block, baseline]
        rows.append((1.0, float(mine.position - theirs.position), carry(mine, theirs, arm)))
    full = np.asarray(rows, dtype=np.float64).reshape(len(blocks), 3)
    if len(blocks) - 3 >= MIN_RESIDUAL_DF and condition(full) <= MAX_CONDITION:
        return Design(full, True)
    # blocks that were lost may leave one order alone: then its effect cannot be told from the contrast
    return Design(full[:, : np.linalg.matrix_rank(full[:, :2])], False)


def carry(mine: Slot, theirs: Slot, arm: str) -> float:
    """Whether this block's arm slot follows `arm` (across a block's edge), less whether its baseline slot does."""
    return float(mine.prev_arm == arm) - float(theirs.prev_arm == arm)


def condition(matrix: Array) -> float:
    """Condition number with columns scaled to length 1; infinite for a zero column."""
    lengths = np.linalg.norm(matrix, axis=0)
    return math.inf if (lengths == 0).any() else float(np.linalg.cond(matrix / lengths))


def fit(differences: Array, design: Design) -> Fit:
    """Least squares of d [..., n] on the design; the intercept is the contrast at equal position and predecessor."""
    matrix = design.matrix
    n, width = matrix.shape
    assert differences.shape[-1] == n, (differences.shape, n)
    df = n - width
    found = least_squares(differences, matrix, df)
    intercept, *order = found.effects()
    return Fit(intercept.size, intercept.se, df, n, found.sd, *both(order), order_df=df, blocks=n)


def both(order: Sequence[Effect]) -> tuple[Effect | None, Effect | None]:
    """Position and predecessor effect, as far as there are."""
    return (order[0] if order else None, order[1] if len(order) > 1 else None)


@dataclass(frozen=True)
class LeastSquares:
    """Coefficients [..., p] and residual sd [...] of values [..., n] on a matrix [n, p]; `spread` is (XᵀX)⁻¹."""

    coefficients: Array
    spread: Array
    sd: Array

    def effects(self) -> list[Effect]:
        """Each coefficient with its standard error."""
        scales = np.sqrt(np.diag(self.spread))
        return [Effect(self.coefficients[..., place], self.sd * scale) for place, scale in enumerate(scales)]


def least_squares(values: Array, matrix: Array, df: int) -> LeastSquares:
    """Ordinary least squares with `df` residual degrees of freedom."""
    assert df >= 1, (matrix.shape, df)
    inverse = np.linalg.pinv(matrix)
    coefficients = values @ inverse.T
    residuals = values - coefficients @ matrix.T
    return LeastSquares(coefficients, inverse @ inverse.T, np.sqrt((residuals**2).sum(axis=-1) / df))


def fit_starts(differences: Array, design: Design, starts: Sequence[int]) -> Fit:
    """The start as the sample: d [..., n] averaged inside each of s starts, then t over the averages with s − 1 df.

    What differs from one start of a program to the next is in every block of a start, so blocks of one start are not
    independent. Position and predecessor effects are estimated inside the starts, where that difference cancels, and
    taken out before averaging; the error of doing so is common to all starts and is added to theirs. Where they cannot
    be estimated (few blocks a start) the row sets balance them.
    """
    labels, place = np.unique(np.asarray(starts), return_inverse=True)
    averaging = np.eye(len(labels))[place] / np.bincount(place)[place, None]  # [n, s]
    n, s = averaging.shape
    assert s >= 2, s
    order = design.matrix[:, 1:]
    within = order - (averaging.T @ order)[place]
    df = n - s - within.shape[1]
    found = None
    if order.shape[1] and df >= MIN_RESIDUAL_DF and condition(within) <= MAX_CONDITION:
        found = least_squares(differences - (differences @ averaging)[..., place], within, df)
        differences = differences - found.coefficients @ order.T
    averages = differences @ averaging
    sd = np.std(averages, axis=-1, ddof=1)
    shared = np.zeros_like(sd)
    if found is not None:
        middle = (averaging.T @ order).mean(axis=0)
        shared = found.sd**2 * float(middle @ found.spread @ middle)
    se = np.sqrt(sd**2 / s + shared)
    order_effects = [] if found is None else found.effects()
    return Fit(averages.mean(axis=-1), se, s - 1, s, sd, *both(order_effects), order_df=df, blocks=n, unit="start")


def start_averages(differences: Array, starts: Sequence[int]) -> Array:
    """d [n] averaged inside each start, in the order of the starts."""
    labels = np.asarray(starts)
    return np.asarray([differences[labels == label].mean() for label in np.unique(labels)])


def signed_rank_cut(n: int, level: float = LEVEL) -> int:
    """Largest c with P(W⁺ ≤ c − 1) ≤ (1 − level)/2 under the null, by exact counting; 0: no such interval."""
    counts = np.zeros(n * (n + 1) // 2 + 1)
    counts[0] = 1.0
    for rank in range(1, n + 1):
        counts[rank:] = counts[rank:] + counts[:-rank]
    cumulative = np.cumsum(counts) / 2.0**n
    return int(np.searchsorted(cumulative, (1 - level) / 2, side="right"))


def hodges_lehmann(differences: Array, level: float = LEVEL) -> tuple[float, float, float]:
    """Median of the Walsh averages of d [n], and its exact signed-rank interval, which is infinite below n = 7."""
    n = len(differences)
    rows, columns = np.triu_indices(n)
    walsh = np.sort((differences[rows] + differences[columns]) / 2)
    cut = signed_rank_cut(n, level) if n >= MIN_SIGNED_RANK else 0
    middle = float(np.median(walsh))
    return (middle, float(walsh[cut - 1]), float(walsh[-cut])) if cut else (middle, -math.inf, math.inf)


def outliers(values: Array) -> npt.NDArray[np.bool_]:
    """Which values lie further than modified z 3.5 from the median (Iglewicz and Hoaglin); marked, never deleted."""
    deviation = np.abs(values - np.median(values))
    mad = float(np.median(deviation))
    return np.asarray(0.6745 * deviation > MODIFIED_Z * mad if mad > 0 else np.zeros(len(values), dtype=bool))


def minimum_detectable_effect(sd: float, n: int, df: int) -> float:
    """Smallest relative change found with 80 % power at 5 %: exp((t.975 + t.80)·sd/√n) − 1."""
    return math.expm1((t_quantile(0.5 + LEVEL / 2, df) + t_quantile(POWER, df)) * sd / math.sqrt(n))


def blocks_to_resolve(sd: float, margin: float, k: int, limit: int = 10_000) -> int | None:
    """Blocks (whole row sets) whose minimum detectable effect is within the margin; None past the limit."""
    blocks = whole_row_sets(MIN_RESIDUAL_DF + 3, k)
    while blocks <= limit:
        if minimum_detectable_effect(sd, blocks, blocks - 3) <= margin:
            return blocks
        blocks = whole_row_sets(math.ceil(blocks * 1.1) if blocks > 200 else blocks + 1, k)
    return None


def starts_to_resolve(sd: float, margin: float, limit: int = 200) -> int | None:
    """Starts whose minimum detectable effect is within the margin; None past the limit."""
    return next((s for s in range(2, limit + 1) if minimum_detectable_effect(sd, s, s - 1) <= margin), None)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p values, in the given order."""
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def bonferroni_level(tests: int) -> float:
    """Level of each interval so that `tests` of them hold together at LEVEL."""
    return 1 - (1 - LEVEL) / max(tests, 1)
