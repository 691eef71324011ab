"""Paired log-ratios and what can be said of them; pure numpy, scipy's special functions imported late.

z = ln(seconds per token) of a slot; d = z_arm − z_base of a block. A block is one observation; a request or a token is
not.
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
MAX_CONDITION = 10.0


@dataclass(frozen=True)
class Design:
    """Regressors of one contrast, one row a block: intercept, position difference, perhaps predecessor."""

    matrix: Array
    has_predecessor: bool


@dataclass(frozen=True)
class Fit:
    """θ̂ = ln(time ratio) of one contrast with its own residual df; `sd` is that of the residuals (of d, adjusted).

    `position` is the effect of standing one slot later, `predecessor` that of following this arm rather than another;
    each comes with its standard error. Fields are scalars, or arrays over simulated runs.
    """

    estimate: Array
    se: Array
    df: int
    n: int
    sd: Array
    position: Array
    position_se: Array
    predecessor: Array | None
    predecessor_se: Array | None

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

    The predecessor column is left out where it is constant, badly conditioned, or leaves too few degrees of freedom.
    """
    place = {(slot.block, slot.arm): slot for slot in slots}
    rows = []
    for block in blocks:
        mine, theirs = place[block, arm], place[block, baseline]
        rows.append((1.0, float(mine.position - theirs.position), carry(mine, theirs, arm)))
    full = np.asarray(rows, dtype=np.float64).reshape(len(blocks), 3)
    if len(blocks) - 3 >= MIN_RESIDUAL_DF and condition(full) <= MAX_CONDITION:
        return Design(full, True)
    return Design(full[:, :2], False)


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
    inverse = np.linalg.pinv(matrix)
    coefficients = differences @ inverse.T
    residuals = differences - coefficients @ matrix.T
    df = n - width
    assert df >= 1, (n, width)
    sd = np.sqrt((residuals**2).sum(axis=-1) / df)
    spread = np.sqrt(np.diag(inverse @ inverse.T))
    return Fit(
        estimate=coefficients[..., 0],
        se=sd * spread[0],
        df=df,
        n=n,
        sd=sd,
        position=coefficients[..., 1],
        position_se=sd * spread[1],
        predecessor=coefficients[..., 2] if design.has_predecessor else None,
        predecessor_se=sd * spread[2] if design.has_predecessor else None,
    )


def signed_rank_cut(n: int, level: float = LEVEL) -> int:
    """Largest c with P(W⁺ ≤ c − 1) ≤ (1 − level)/2 under the null, by exact counting; 0: no such interval."""
    counts = np.zeros(n * (n + 1) // 2 + 1)
    counts[0] = 1.0
    for rank in range(1, n + 1):
        counts[rank:] = counts[rank:] + counts[:-rank]
    cumulative = np.cumsum(counts) / 2.0**n
    return int(np.searchsorted(cumulative, (1 - level) / 2, side="right"))


def hodges_lehmann(differences: Array, level: float = LEVEL) -> tuple[float, float, float]:
    """Median of the Walsh averages of d [n], and its exact signed-rank interval (infinite where n is too small)."""
    n = len(differences)
    rows, columns = np.triu_indices(n)
    walsh = np.sort((differences[rows] + differences[columns]) / 2)
    cut = signed_rank_cut(n, level)
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
