"""A run that can only be INVALID ends, keeps its record, and says why and what to change."""

from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from pocketllm.bench.run import Outcome
from pocketllm.bench.targets.contract import Ask, Sample
from pocketllm.bench.targets.gate import GateAnswer, GateState
from pocketllm.evidence.store import read_record
from tests.unit.test_bench_run import Quiet, code_of, run, spoiled

Spoil = Callable[[int, Ask, Sample], None]


def lagging(number: int, ask: Ask, sample: Sample) -> None:
    sample.loop_lag_ms = 5.0


def failing(number: int, ask: Ask, sample: Sample) -> None:
    if number >= 3:  # the warm-up is answered
        sample.error = "HTTP 500"


def compiling(number: int, ask: Ask, sample: Sample) -> None:
    sample.compiles = 1


def without_a_stamp(number: int, ask: Ask, sample: Sample) -> None:
    sample.chunk_t_ns, sample.chunk_ntok = sample.chunk_t_ns[:1], sample.chunk_ntok[:1]


def cached(number: int, ask: Ask, sample: Sample) -> None:
    sample.n_cached = 12


def shorter(number: int, ask: Ask, sample: Sample) -> None:
    sample.n_out -= 1


def empty(number: int, ask: Ask, sample: Sample) -> None:
    if number >= 3:
        sample.n_out, sample.chunk_t_ns, sample.chunk_ntok = 0, [], []


def blocks_of(outcome: Outcome) -> int:
    return len({row["block"] for row in read_record(outcome.path).row_dicts if row["phase"] == "measure"})


def end_of(outcome: Outcome) -> list[str]:
    return [note for note in outcome.document["notes"] if note.startswith("stopped after")]


@pytest.mark.parametrize(
    ("spoil", "blocks", "words"),
    [
        (lagging, 4, ["each of them fails: V09 the client's own loop lagged", "leave a core to the client"]),
        (failing, 4, ["V01 8 requests failed, first: arm b, block 0: HTTP 500", "see what the arm prints"]),
        (compiling, 4, ["V13", "warm up longer"]),
        (without_a_stamp, 4, ["decode: 4 slots of b show no such value"]),
        (cached, 4, ["V04 cached prompt tokens differ: base 0, b 12", "prefix_cache=false"]),
        (shorter, 1, ["no further block can make it valid: V02", "--output-len"]),
        (empty, 1, ["no further block can make it valid: V03", "leave it out"]),
    ],
)
def test_a_run_whose_first_blocks_all_fail_ends_with_the_reason_and_what_to_change(
    tmp_path: Path, spoil: Spoil, blocks: int, words: list[str]
) -> None:
    progress = Quiet()
    outcome = run(tmp_path, rig=spoiled("b", spoil), progress=progress)

    assert blocks_of(outcome) == blocks
    (end,) = end_of(outcome)
    assert end.startswith(f"stopped after {blocks} blocks, INVALID: ")
    assert [word for word in words if word not in end] == []
    assert end in progress.lines
    assert (outcome.document["valid"], outcome.document["complete"], code_of(outcome)) == (False, True, 3)


def test_a_remark_is_not_among_the_reasons_why_a_run_ended(tmp_path: Path) -> None:
    def silent(rig: object, arm: object) -> GateAnswer:
        return GateAnswer(GateState.ABSENT, "tokens not compared")

    outcome = run(tmp_path, rig=spoiled("b", lagging), gate=silent)

    (end,) = end_of(outcome)
    assert "each of them fails: V09" in end
    assert "V11" not in end
    assert any(check["code"] == "V11" for check in outcome.document["checks"])


def lost(blocks: Collection[int], number_of_blocks: int, tmp_path: Path) -> Outcome:
    """A run in which the client lags in some blocks."""

    def spoil(number: int, ask: Ask, sample: Sample) -> None:
        slot = (number - 3) // 2  # a burn-in and one that is measured, after three of the warm-up
        sample.loop_lag_ms = 5.0 if slot in blocks else 0.1

    return run(tmp_path, rig=spoiled("b", spoil), blocks=number_of_blocks, requests=1)


@pytest.mark.parametrize(("blocks", "ran"), [({1, 2, 3, 4, 5}, 12), ({1, 2, 3, 4, 5, 6}, 7), ({1, 3, 5, 7, 9, 10}, 11)])
def test_a_run_goes_on_while_seven_blocks_can_still_be_valid(tmp_path: Path, blocks: set[int], ran: int) -> None:
    outcome = lost(blocks, 12, tmp_path)

    assert blocks_of(outcome) == ran
    assert outcome.document["valid"] is (ran == 12)
    ends = [f"stopped after {ran} blocks, INVALID: 6 of 12 blocks are lost, 7 are needed: V09 "] * (ran < 12)
    assert [end[: len(ends[0])] for end in end_of(outcome)] == ends
