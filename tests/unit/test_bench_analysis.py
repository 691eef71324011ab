"""What a contrast would be without its outliers."""

from pathlib import Path

import pytest

from pocketllm.bench.analysis.contrasts import Contrast, adjusted_p
from pocketllm.bench.arm import Role
from pocketllm.bench.targets.contract import Ask, Sample
from tests.unit.test_bench_run import run, spoiled
from tests.unit.test_bench_verdict import fit


def contrast(arm: str, percent: float) -> Contrast:
    return Contrast("decode", arm, Role.CANDIDATE, fit(percent, 1.0), (0.0, 0.0, 0.0), (), None, None)


def test_the_adjusted_p_is_that_of_the_fit_at_hand_within_its_family() -> None:
    family = [contrast("b", 2.0), contrast("c", 5.0)]
    alone = float(fit(2.0, 1.0).p_value)
    sharper = fit(2.0, 0.1)

    assert adjusted_p(family, family[0], family[0].fit) == pytest.approx(alone)
    assert adjusted_p(family, family[0], sharper) == pytest.approx(2 * float(sharper.p_value))
    assert adjusted_p(family, contrast("null", 0.0), sharper) is None


def test_a_verdict_that_hangs_on_an_outlier_says_so(tmp_path: Path) -> None:
    def interrupt_once(number: int, ask: Ask, sample: Sample) -> None:
        if number in (12, 13):  # the two measured requests of one slot
            sample.chunk_t_ns = [sample.chunk_t_ns[0] + 4 * (t - sample.chunk_t_ns[0]) for t in sample.chunk_t_ns]

    outcome = run(tmp_path, rig=spoiled("b", interrupt_once))
    result = next(r for r in outcome.document["results"] if (r["arm"], r["metric"]) == ("b", "decode"))

    assert result["outlying_blocks"] == 1
    assert result["verdict"] == "NOT DISTINGUISHABLE"
    assert result["flips_without_outliers"]
