"""The instrument against itself: simulated costs, 2,000 seeds at once."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats as scipy_stats

from pocketllm.bench.analysis import stats
from pocketllm.bench.analysis.verdict import DEFAULT_MARGINS, Evidence, Word, judge, noise_floor
from pocketllm.bench.arm import Isolation
from pocketllm.bench.schedule import order

SEEDS = 2000
NAMES = ("base", "candidate", "null")
Array = npt.NDArray[np.float64]


class Simulation:
    """ln costs [seeds, block] by arm: block drift, slot drift, a position penalty and a noisy third arm, if asked.

    `starts` starts of every arm's process, each with a speed of its own (sd `start_sd`) and as many blocks; the start
    is then the sample, unless `by_block` says otherwise.
    """

    def __init__(
        self,
        effect: float = 0.0,
        position: float = 0.0,
        drift: float = 0.0,
        carry: float = 0.0,
        noisy: float = 1.0,
        sd: float = 0.01,
        names: tuple[str, ...] = NAMES,
        blocks: int = 12,
        seed: int = 3,
        starts: int = 1,
        start_sd: float = 0.0,
        by_block: bool = False,
    ) -> None:
        self.slots = order(names, blocks, seed=seed)
        self.blocks = range(blocks)
        start_of = np.arange(blocks) * starts // blocks
        self.starts = None if starts == 1 or by_block else start_of.tolist()
        rng = np.random.default_rng(seed)
        shared = rng.normal(0, 0.02, (SEEDS, blocks))
        self.logs = {name: shared.copy() for name in names}
        for slot in self.slots:
            spread = sd * (noisy if slot.arm == "noisy" else 1.0)
            value = rng.normal(0, spread, SEEDS) + position * slot.position + drift * slot.index
            value += effect * (slot.arm == "candidate") + carry * (slot.prev_arm == "candidate")
            self.logs[slot.arm][:, slot.block] += value
        for name in names:
            self.logs[name] += rng.normal(0, start_sd, (SEEDS, starts))[:, start_of]

    def fit(self, arm: str) -> tuple[Array, stats.Fit]:
        differences = self.logs[arm] - self.logs["base"]
        design = stats.make_design(self.slots, arm, "base", self.blocks)
        if self.starts is None:
            return differences, stats.fit(differences, design)
        return differences, stats.fit_starts(differences, design, self.starts)

    def robust(self, differences: Array) -> tuple[float, float, float]:
        """The cross-check of one run, over what is the sample."""
        samples = differences if self.starts is None else stats.start_averages(differences, self.starts)
        return stats.hodges_lehmann(samples)


def covers(fit: stats.Fit, truth: float, level: float = 0.95) -> float:
    low, high = fit.interval(level)
    return float(np.mean((low <= truth) & (truth <= high)))


@pytest.mark.parametrize("effect", [0.0, 0.05])
@pytest.mark.parametrize(("names", "blocks"), [(NAMES, 12), (("base", "candidate", "noisy", "null"), 12)])
def test_the_95_percent_interval_covers_the_truth_94_to_96_times_in_100(
    effect: float, names: tuple[str, ...], blocks: int
) -> None:
    coverage = np.mean(
        [
            covers(Simulation(effect, names=names, blocks=blocks, noisy=8, seed=s).fit("candidate")[1], effect)
            for s in range(4)
        ]
    )

    assert 0.94 <= coverage <= 0.96


def test_a_narrower_interval_would_be_caught() -> None:
    _, fit = Simulation().fit("candidate")

    assert covers(fit, 0.0, level=0.90) < 0.94


FOUR = ("base", "candidate", "noisy", "null")
AGAINST_ITSELF = {
    "three arms": {"sd": 0.004},
    "noise as wide as the margin": {"sd": 0.01},
    "a noisy third arm": {"sd": 0.004, "noisy": 10.0, "names": FOUR},
    "starts that differ": {"sd": 0.004, "blocks": 30, "starts": 5, "start_sd": 0.01},
    "starts that differ, four arms": {"sd": 0.004, "blocks": 40, "starts": 10, "start_sd": 0.02, "names": FOUR},
    "a position penalty": {"sd": 0.004, "position": 0.02},
    "a linear drift": {"sd": 0.004, "drift": 0.002},
}


@pytest.mark.parametrize("world", AGAINST_ITSELF.values(), ids=AGAINST_ITSELF)
def test_a_against_a_excludes_0_in_4_to_6_runs_of_100_and_is_called_different_in_at_most_15_of_1000(
    world: dict[str, Any],
) -> None:
    simulations = [Simulation(**world, seed=seed) for seed in (3, 4)]

    excludes = np.mean([1 - covers(simulation.fit("candidate")[1], 0.0) for simulation in simulations])
    calls = [word in (Word.FASTER, Word.SLOWER) for word in words_of(simulations[0], "candidate")]
    assert 0.04 <= excludes <= 0.06
    assert np.mean(calls) <= 0.015


def test_starts_that_do_not_differ_cost_power_and_no_false_calls() -> None:
    simulation = Simulation(sd=0.004, blocks=60, starts=10)

    # the error of the order effects is common to all starts: left out, 0 would be excluded in 8 runs of 100
    assert 1 - covers(simulation.fit("candidate")[1], 0.0) <= 0.06
    assert not {Word.FASTER, Word.SLOWER} & set(words_of(simulation, "candidate", limit=300))


def test_blocks_of_one_start_taken_for_independent_would_be_caught() -> None:
    world = {"sd": 0.004, "blocks": 30, "starts": 5, "start_sd": 0.02}

    assert 1 - covers(Simulation(**world, by_block=True).fit("candidate")[1], 0.0) > 0.3


@pytest.mark.parametrize("world", [{"starts": 5, "blocks": 30}, {"starts": 10, "blocks": 60}], ids=["5", "10"])
def test_the_interval_over_starts_covers_the_truth_94_to_96_times_in_100(world: dict[str, int]) -> None:
    fits = [
        Simulation(0.05, **world, start_sd=0.02, position=0.01, carry=0.01, seed=s).fit("candidate")[1]
        for s in range(4)
    ]

    assert 0.94 <= np.mean([covers(fit, 0.05) for fit in fits]) <= 0.96
    assert {(fit.unit, fit.n, fit.df) for fit in fits} == {("start", world["starts"], world["starts"] - 1)}


def test_stopping_on_a_half_width_at_the_end_of_row_sets_keeps_the_false_calls_at_5_in_100() -> None:
    """Rows of 6 blocks are added until the interval is within ±0.8 %, 48 at most."""
    simulation = Simulation(sd=0.01, blocks=48)
    stopped = np.zeros(SEEDS, dtype=bool)
    wrong = np.zeros(SEEDS, dtype=bool)
    for blocks in range(12, 49, 6):
        differences = (simulation.logs["candidate"] - simulation.logs["base"])[:, :blocks]
        fit = stats.fit(differences, stats.make_design(simulation.slots, "candidate", "base", range(blocks)))
        low, high = fit.interval()
        ends = ~stopped & ((high - low < 2 * 0.008) | (blocks == 48))
        wrong |= ends & ((low > 0) | (high < 0))
        stopped |= ends

    assert stopped.all()
    assert 0.04 <= np.mean(wrong) <= 0.065


def words_of(simulation: Simulation, arm: str, limit: int = SEEDS) -> list[Word]:
    """A verdict for each seed."""
    differences, fits = simulation.fit(arm)
    _, nulls = simulation.fit("null")
    words = []
    for index in range(limit):
        fit = one(fits, index)
        evidence = Evidence(
            fit=fit,
            robust=simulation.robust(differences[index]),
            adjusted_p=float(fit.p_value),
            tests=1,
            margin=DEFAULT_MARGINS[Isolation.TOGGLE],
            floor=noise_floor(float(nulls.estimate[index]), ()),
        )
        words.append(judge(evidence).word)
    return words


def one(fit: stats.Fit, index: int) -> stats.Fit:
    """One simulated run of a vectorized fit."""
    return replace(fit, estimate=fit.estimate[index], se=fit.se[index], sd=fit.sd[index])


def test_a_real_difference_of_three_margins_is_found() -> None:
    words = words_of(Simulation(effect=0.03, sd=0.004), "candidate", limit=300)

    assert words.count(Word.SLOWER) / 300 > 0.95
    assert Word.FASTER not in words


def test_equal_arms_on_a_quiet_machine_are_called_the_same() -> None:
    words = words_of(Simulation(sd=0.002), "candidate", limit=300)

    assert words.count(Word.SAME) / 300 > 0.95


@pytest.mark.parametrize("disturbance", [{"position": 0.02}, {"drift": 0.005}, {"position": -0.01, "drift": -0.01}])
def test_a_position_penalty_or_a_linear_drift_does_not_move_the_ratio(disturbance: dict[str, float]) -> None:
    fits = [Simulation(effect=0.05, **disturbance, seed=seed).fit("candidate")[1] for seed in range(3, 7)]

    assert float(np.mean([fit.estimate for fit in fits])) == pytest.approx(0.05, abs=0.001)
    assert 0.94 <= np.mean([covers(fit, 0.05) for fit in fits]) <= 0.96


def test_what_an_arm_leaves_to_its_successor_is_taken_out_and_seen() -> None:
    _, fit = Simulation(effect=0.05, carry=0.02).fit("candidate")

    assert fit.predecessor is not None
    assert float(np.mean(fit.estimate)) == pytest.approx(0.05, abs=0.002)
    assert float(np.mean(fit.predecessor.size)) == pytest.approx(0.02, abs=0.003)


def test_a_position_effect_is_estimated() -> None:
    _, fit = Simulation(position=0.02).fit("candidate")

    assert fit.position is not None
    assert float(np.mean(fit.position.size)) == pytest.approx(0.02, abs=0.001)


def test_the_fit_is_least_squares() -> None:
    slots = order(NAMES, 12, seed=2)
    design = stats.make_design(slots, "candidate", "base", range(12))
    differences = np.random.default_rng(0).normal(0.1, 0.05, 12)
    fit = stats.fit(differences, design)

    expected, residual, *_ = np.linalg.lstsq(design.matrix, differences, rcond=None)
    assert float(fit.estimate) == pytest.approx(expected[0])
    assert float(fit.sd) == pytest.approx(np.sqrt(residual[0] / fit.df))
    assert fit.df == 12 - design.matrix.shape[1]


@pytest.mark.parametrize("n", range(1, 13))
def test_the_signed_rank_distribution_is_exact(n: int) -> None:
    ranks = np.arange(1, n + 1)
    sums = [float(ranks @ np.array(signs)) for signs in product((0, 1), repeat=n)]
    cut = stats.signed_rank_cut(n)

    assert cut == 0 or np.mean([total <= cut - 1 for total in sums]) <= 0.025
    assert np.mean([total <= cut for total in sums]) > 0.025


def test_hodges_lehmann_agrees_with_the_signed_rank_test_on_excluding_zero() -> None:
    rng = np.random.default_rng(5)
    for _ in range(200):
        differences = rng.normal(0.6, 1.0, 10)
        _, low, high = stats.hodges_lehmann(differences)
        p = scipy_stats.wilcoxon(differences, method="exact").pvalue

        assert (low > 0 or high < 0) == (p <= 0.05)


def test_fewer_than_seven_observations_have_no_signed_rank_interval() -> None:
    assert stats.hodges_lehmann(np.arange(1.0, 7.0))[1:] == (-np.inf, np.inf)
    assert stats.hodges_lehmann(np.arange(1.0, 8.0))[1:] == (2.0, 6.0)


def test_an_outlier_is_marked_and_equal_values_are_none() -> None:
    values = np.array([1.0, 1.01, 0.99, 1.02, 0.98, 5.0])

    assert stats.outliers(values).tolist() == [False] * 5 + [True]
    assert not stats.outliers(np.ones(5)).any()


@pytest.mark.parametrize(("n", "expected"), [(6, 0.014), (10, 0.010), (20, 0.0066)])
def test_the_smallest_change_found_has_the_published_size(n: int, expected: float) -> None:
    assert stats.minimum_detectable_effect(0.01, n, n - 1) == pytest.approx(expected, rel=0.03)


def test_the_blocks_that_resolve_a_margin_do_and_one_row_set_fewer_do_not() -> None:
    needed = stats.blocks_to_resolve(0.02, 0.01, k=3)

    assert needed is not None
    assert needed % 6 == 0
    assert stats.minimum_detectable_effect(0.02, needed, needed - 3) <= 0.01
    assert stats.minimum_detectable_effect(0.02, needed - 6, needed - 9) > 0.01
    assert stats.blocks_to_resolve(10.0, 0.01, k=3) is None


def test_holm_steps_down() -> None:
    assert stats.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert stats.holm([0.9, 0.8]) == [1.0, 1.0]
    assert stats.holm([]) == []
    assert stats.bonferroni_level(2) == pytest.approx(0.975)


def test_a_start_level_fit_is_t_over_the_averages_of_the_starts() -> None:
    slots = order(NAMES, 30, seed=2)
    starts = [block // 6 for block in range(30)]
    differences = np.random.default_rng(0).normal(0.1, 0.05, 30)
    design = stats.Design(stats.make_design(slots, "candidate", "base", range(30)).matrix[:, :2], False)
    fit = stats.fit_starts(differences, design, starts)
    expected = scipy_stats.ttest_1samp([differences[np.array(starts) == s].mean() for s in range(5)], 0.0)

    # row sets balance the positions, so taking their effect out changes no average
    assert float(fit.p_value) == pytest.approx(expected.pvalue)
    assert (fit.df, fit.n, fit.blocks, fit.unit) == (4, 5, 30, "start")


def test_starts_of_one_block_each_are_averaged_as_they_are() -> None:
    slots = order(NAMES, 12, seed=2)
    differences = np.random.default_rng(0).normal(0.1, 0.05, 12)
    fit = stats.fit_starts(differences, stats.make_design(slots, "candidate", "base", range(12)), range(12))

    assert float(fit.estimate) == pytest.approx(differences.mean())
    assert (fit.position, fit.predecessor) == (None, None)


def test_the_starts_that_resolve_a_margin_do_and_one_fewer_does_not() -> None:
    needed = stats.starts_to_resolve(0.01, 0.01)

    assert needed is not None
    assert stats.minimum_detectable_effect(0.01, needed, needed - 1) <= 0.01
    assert stats.minimum_detectable_effect(0.01, needed - 1, needed - 2) > 0.01
    assert stats.starts_to_resolve(10.0, 0.01) is None


def test_blocks_of_one_order_alone_leave_the_ratio_whole() -> None:
    slots = order(["base", "candidate"], 16, 1)
    place = {(slot.block, slot.arm): slot.position for slot in slots}
    kept = [block for block in range(16) if place[block, "candidate"] > place[block, "base"]]
    differences = np.full(len(kept), 0.1) + np.resize([0.001, -0.001], len(kept))

    design = stats.make_design(slots, "candidate", "base", kept)
    for fit in (stats.fit(differences, design), stats.fit_starts(differences, design, [0, 0, 0, 0, 1, 1, 1, 1])):
        assert float(fit.estimate) == pytest.approx(0.1)
        assert fit.position is None
