"""The ladder: each rung by its records and no other way, demotion at once, nothing across checkpoints or devices."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pocketllm.errors import RecordError
from pocketllm.evidence.ladder import Evidence, LadderRow, compute, ladder
from pocketllm.evidence.ladder.suite import Suite, suite_of, suites_of
from pocketllm.evidence.store import RecordWriter, keep
from tests.suites import CASES, write_suite

SHA, OTHER_SHA, TINY_SHA = "a" * 64, "b" * 64, "c" * 64
MODEL = {"name": "smol", "sha256": SHA, "architecture": "llama", "quant_types": ["F32", "Q4_1"]}
TINY = {"name": "tiny", "sha256": TINY_SHA, "architecture": "llama", "quant_types": ["F32", "Q4_1"]}


def row(
    entry_point: str = "http_chat", check: str = "tokens", outcome: str = "IDENTICAL", **more: Any
) -> dict[str, Any]:
    base = {"case": "capital", "entry_point": entry_point, "check": check, "stream": False, "concurrency": 1}
    return {**base, "outcome": outcome, **more}


def served_rows(outcome: str = "IDENTICAL") -> list[dict[str, Any]]:
    return [
        row(outcome=outcome),
        row(outcome=outcome, stream=True),
        row(outcome=outcome, stream=True, concurrency=2),
        row(check="cancel", outcome=outcome, stream=True),
        row(check="shutdown", outcome=outcome, stream=True),
    ]


def parity_row(**more: Any) -> dict[str, Any]:
    return {"subject": "logits", "oracle": "float", "n": 40, "max_error": 1e-6, "passed": True, **more}


BENCH = {"valid": True, "null_valid": True, "served": False}

Make = Callable[[str], Evidence]


def make(kind: str, rows: Sequence[dict[str, Any]] = (), model: dict[str, Any] = MODEL, **document: Any) -> Make:
    return lambda run_id: Evidence(run_id, kind, {"device_class": "cpu", "model": model, **document}, rows)


INSPECT = make("inspect", report={"errors": []})
PARITY = make("parity", [parity_row()], TINY)
GENERATE = make("golden", [row("generate"), row("generate", case="emoji", outcome="TIE")])
TIMED = make("bench", **BENCH)
HTTP = make("golden", served_rows())
SERVED = make("bench", **{**BENCH, "served": True})
WHOLE = (INSPECT, PARITY, GENERATE, TIMED, HTTP, SERVED)
CAPITAL = {"smol": Suite(frozenset({("capital", "generate"), ("capital", "http_chat")}))}


def climb(*makes: Make, sha256: str = SHA, device_class: str = "cpu") -> LadderRow | None:
    rows = compute((made(f"{place:026d}") for place, made in enumerate(makes)), CAPITAL)
    return next((found for found in rows if (found.sha256, found.device_class) == (sha256, device_class)), None)


def rung(*makes: Make) -> int:
    found = climb(*makes)
    assert found is not None
    return found.rung


# -- one rung after another --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("makes", "expected", "words", "missing"),
    [
        ([make("inspect", report={"errors": ["x", "y"]})], 0, "unproven", "tells of 2 errors"),
        ([make("inspect", report={})], 0, "unproven", "does not say which errors"),
        ([INSPECT], 1, "inspect only", "a parity record of family llama"),
        ([INSPECT, PARITY], 2, "experimental", "a golden record through generate"),
        ([INSPECT, PARITY, GENERATE], 2, "experimental", "a bench record with a valid null arm"),
        ([INSPECT, PARITY, TIMED], 2, "experimental", "a golden record through generate"),
        ([INSPECT, PARITY, GENERATE, TIMED], 3, "text, CLI only", "a golden record through HTTP"),
        ([INSPECT, PARITY, GENERATE, TIMED, HTTP], 3, "text, CLI only", "a served bench record"),
        ([INSPECT, PARITY, GENERATE, TIMED, SERVED], 3, "text, CLI only", "a golden record through HTTP"),
        ([INSPECT, PARITY, GENERATE, SERVED, HTTP], 4, "text + server", ""),
        ([*WHOLE], 4, "text + server", ""),
    ],
)
def test_a_rung_is_what_the_records_prove(makes: list[Make], expected: int, words: str, missing: str) -> None:
    found = climb(*makes)

    assert found is not None
    assert (found.rung, found.words) == (expected, words)
    assert missing in found.missing
    assert bool(found.missing) == (expected < 4)


@pytest.mark.parametrize("place", range(len(WHOLE)))
def test_every_one_of_the_proofs_is_needed(place: int) -> None:
    without = [made for other, made in enumerate(WHOLE) if other != place]

    # the served bench run has a valid null arm too, so the plain one is the only proof that another can stand in for
    assert rung(*without) == [0, 1, 2, 4, 3, 3][place]


@pytest.mark.parametrize("place", range(len(WHOLE)))
@pytest.mark.parametrize("change", ["sha256", "device_class", "architecture"])
def test_a_proof_of_another_checkpoint_device_or_family_proves_nothing_here(place: int, change: str) -> None:
    def elsewhere(run_id: str) -> Evidence:
        item = WHOLE[place](run_id)
        if change == "device_class":
            return dataclasses.replace(item, document={**item.document, "device_class": "cuda"})
        value = {"sha256": OTHER_SHA, "architecture": "qwen2"}[change]
        return dataclasses.replace(item, document={**item.document, "model": {**item.model, change: value}})

    moved = rung(*(elsewhere if other == place else made for other, made in enumerate(WHOLE)))

    if WHOLE[place] is PARITY:
        assert moved == {"sha256": 4, "device_class": 1, "architecture": 1}[change]
    elif change == "architecture":
        assert moved >= 1
    else:
        # an inspection runs nothing, so it is of every device class
        assert moved == [4 if change == "device_class" else 0, 1, 2, 4, 3, 3][place]


@pytest.mark.parametrize("place", range(len(WHOLE)))
def test_what_the_reference_backend_did_proves_nothing_of_the_native_one(place: int) -> None:
    # as they were written when the class was the device alone
    def by_reference(run_id: str) -> Evidence:
        item = WHOLE[place](run_id)
        plan = {"device": "cpu", "backend": "reference"}
        return item if item.kind == "inspect" else dataclasses.replace(item, document={**item.document, "plan": plan})

    makes = [by_reference if other == place else made for other, made in enumerate(WHOLE)]

    assert rung(*makes) == [4, 1, 2, 4, 3, 3][place]


def test_two_backends_of_one_device_climb_apart_and_an_inspection_alone_makes_no_third_row() -> None:
    def by(backend: str, made: Make) -> Make:
        def again(run_id: str) -> Evidence:
            item = made(run_id)
            plan = {"device": "cpu", "backend": backend}
            return dataclasses.replace(item, document={**item.document, "plan": plan})

        return again

    makes = [INSPECT, *(by("reference", made) for made in WHOLE[1:]), by("cpu", GENERATE)]
    rows = compute((made(f"{place:026d}") for place, made in enumerate(makes)), CAPITAL)

    assert {row.device_class: row.rung for row in rows} == {"cpu": 1, "cpu-reference": 4}


def test_a_run_of_processes_counts_only_where_its_baseline_is_this_engine() -> None:
    foreign = make("bench", **BENCH, isolation="process")

    assert rung(INSPECT, PARITY, GENERATE, foreign) == 2
    assert rung(INSPECT, PARITY, GENERATE, make("bench", **{**BENCH, "served": True}, isolation="process")) == 3


def test_proofs_link_the_records_they_stand_on() -> None:
    found = climb(*WHOLE)

    assert found is not None
    assert [(proof.rung, int(proof.run_id)) for proof in found.proofs] == [
        (1, 0),
        (2, 1),
        (3, 2),
        (3, 5),
        (4, 4),
        (4, 5),
    ]


# -- rung 2 ------------------------------------------------------------------------------------------------------------
def typed(*quant_types: str) -> dict[str, Any]:
    return {**TINY, "quant_types": list(quant_types)}


@pytest.mark.parametrize(
    ("parity", "expected"),
    [
        ([make("parity", [parity_row()], typed("F32"))], 1),
        ([make("parity", [parity_row()], typed("F32")), make("parity", [parity_row()], typed("F32", "Q4_1"))], 2),
        ([make("parity", [parity_row()], typed("F32")), make("parity", [parity_row()], typed("Q4_1", "Q6_K"))], 2),
        ([make("parity", [], TINY)], 1),
        ([make("parity", [parity_row(passed=False)], TINY)], 1),
        ([make("parity", [parity_row(passed=None)], TINY)], 1),
        ([make("parity", [parity_row(), parity_row(subject="attention", passed=False)], TINY)], 1),
        ([make("parity", [parity_row(max_error=None)], TINY)], 1),  # texts or tokens agree: no numbers were compared
        ([make("parity", [parity_row(n=64, max_error=None, kl=1e-6)], {**MODEL, "quant_types": []})], 2),
        ([make("parity", [parity_row(n=63)], {**MODEL, "quant_types": []})], 1),
        ([make("parity", [parity_row()], TINY), make("parity", [parity_row(passed=False)], typed("Q6_K"))], 2),
    ],
)
def test_rung_2_needs_the_family_with_every_type_or_the_checkpoint_itself(parity: list[Make], expected: int) -> None:
    assert rung(INSPECT, *parity) == expected


def test_few_and_late_parity_records_are_taken_to_cover_the_types() -> None:
    whole, part = make("parity", [parity_row()], TINY), make("parity", [parity_row()], typed("F32", "Q6_K"))

    found = climb(INSPECT, whole, whole, part)

    assert found is not None
    assert [int(proof.run_id) for proof in found.proofs] == [0, 2]


def test_quant_types_that_no_parity_record_covers_are_named() -> None:
    found = climb(INSPECT, make("parity", [parity_row()], typed("F32")))

    assert found is not None
    assert found.missing == "a parity record of family llama with Q4_1"


def test_a_parity_record_alone_makes_no_row_for_its_tiny_checkpoint() -> None:
    assert compute([PARITY("1")], CAPITAL) == []


# -- rung 4 ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("place", range(5))
def test_each_way_through_http_must_be_in_the_record(place: int) -> None:
    rows = served_rows()
    left = [item for other, item in enumerate(rows) if other != place]
    if place == 1:  # the row at concurrency 2 streams as well
        left = [{**item, "stream": False} if item["concurrency"] == 2 else item for item in left]

    found = climb(INSPECT, PARITY, GENERATE, SERVED, make("golden", left))

    assert found is not None
    assert found.rung == 3
    lacking = ["tokens without streaming", "tokens streamed", "tokens at concurrency 2", "cancel", "shutdown"][place]
    assert found.missing == f"golden record {4:026d} lacks {lacking}"


def test_the_ways_through_http_must_be_in_one_record() -> None:
    rows = served_rows()

    assert rung(INSPECT, PARITY, GENERATE, SERVED, make("golden", rows[:3]), make("golden", rows[3:])) == 3


def test_shutdown_in_process_is_not_shutdown_of_a_server() -> None:
    rows = [*served_rows()[:4], row("in_process", check="shutdown")]

    assert rung(INSPECT, PARITY, GENERATE, SERVED, make("golden", rows)) == 3


@pytest.mark.parametrize("flaw", [{"valid": False}, {"null_valid": False}, {"valid": None}, {"served": "yes"}])
def test_a_bench_run_that_is_not_valid_proves_nothing(flaw: dict[str, Any]) -> None:
    assert rung(INSPECT, PARITY, GENERATE, TIMED, HTTP, make("bench", **{**BENCH, "served": True, **flaw})) == 3


# -- demotion ----------------------------------------------------------------------------------------------------------
FAILURES = {
    "inspect": (make("inspect", report={"errors": ["broken"]}), 0),
    "parity": (make("parity", [parity_row(passed=False)], TINY), 1),
    "parity of the real one": (make("parity", [parity_row(passed=False)], MODEL), 1),
    "generate": (make("golden", [row("generate", outcome="REGRESSION")]), 2),
    "in process": (make("golden", [row("in_process", outcome="DRIFT")]), 2),
    "http": (make("golden", [row(outcome="DIVERGED")]), 3),
    "cancel": (make("golden", [row(check="cancel", outcome="REGRESSION", stream=True)]), 3),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_later_failed_proof_demotes_at_once(name: str) -> None:
    failure, expected = FAILURES[name]
    found = climb(*WHOLE, failure)

    assert found is not None
    assert found.rung == expected
    assert f"{len(WHOLE):026d}" in found.missing


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_that_came_before_the_proof_is_history(name: str) -> None:
    before = (
        [FAILURES["in process"][0], make("golden", [row("in_process")])]
        if name == "in process"
        else [FAILURES[name][0]]
    )
    later = [make("parity", [parity_row()], MODEL)] if name == "parity of the real one" else []

    assert rung(*before, *WHOLE, *later) == 4


def test_a_failure_stands_until_the_same_case_passes_again() -> None:
    failure = make("golden", [row("generate", outcome="REGRESSION")])

    assert rung(*WHOLE, failure, make("golden", [row("generate", case="emoji")])) == 2
    assert rung(*WHOLE, failure, make("golden", [row("generate")])) == 4


@pytest.mark.parametrize("outcomes", [("IDENTICAL", "REGRESSION"), ("REGRESSION", "IDENTICAL")])
def test_of_two_rows_of_one_check_the_worse_speaks(outcomes: tuple[str, str]) -> None:
    assert rung(*WHOLE, make("golden", [row("generate", outcome=outcome) for outcome in outcomes])) == 2


@pytest.mark.parametrize("outcome", ["UNRECORDED", "NOT JUDGED"])
def test_what_was_not_judged_neither_proves_nor_demotes(outcome: str) -> None:
    unjudged = make("golden", [row("generate", outcome=outcome), *served_rows(outcome)])

    assert rung(*WHOLE, unjudged) == 4
    assert rung(INSPECT, PARITY, SERVED, unjudged) == 2


def test_a_recording_is_not_evidence() -> None:
    assert rung(*WHOLE, make("golden", [row("generate", outcome="REGRESSION")], recording={"cases": []})) == 4


def test_a_mutated_run_is_red_on_purpose_and_not_evidence() -> None:
    assert rung(*WHOLE, make("golden", [row("generate", outcome="REGRESSION")], mutate="id")) == 4


def test_a_golden_run_against_a_server_by_url_may_speak_of_another_engine() -> None:
    foreign = make("golden", served_rows(), selection={"url": "http://127.0.0.1:8080"})

    assert rung(INSPECT, PARITY, GENERATE, SERVED, foreign) == 3
    assert rung(INSPECT, PARITY, GENERATE, SERVED, make("golden", served_rows(), selection={"url": None})) == 4


def test_a_bench_run_whose_baseline_is_a_foreign_server_proves_nothing_of_ours() -> None:
    foreign = make("bench", **BENCH, isolation="attach")
    ours = make("bench", **{**BENCH, "served": True}, isolation="attach")

    assert rung(INSPECT, PARITY, GENERATE, foreign) == 2
    assert rung(INSPECT, PARITY, GENERATE, ours) == 3


def test_a_superseded_record_no_longer_speaks() -> None:
    failure = make("golden", [row("generate", case="gone", outcome="REGRESSION")])
    correction = make("golden", [row("generate")], supersedes=[f"{len(WHOLE):026d}"])

    assert rung(*WHOLE, failure) == 2
    assert rung(*WHOLE, failure, correction) == 4


# -- properties --------------------------------------------------------------------------------------------------------
POOL = (*WHOLE, *(failure for failure, _ in FAILURES.values()), make("golden", served_rows("NOT JUDGED")))
CHOSEN = st.lists(st.sampled_from(range(len(POOL))), max_size=10)


@given(chosen=CHOSEN)
def test_a_rung_is_claimed_only_with_proofs_for_it_and_all_below(chosen: list[int]) -> None:
    found = climb(*(POOL[place] for place in chosen))

    if found is not None:
        assert {proof.rung for proof in found.proofs} == set(range(1, found.rung + 1))
        assert {int(proof.run_id) for proof in found.proofs} <= set(range(len(chosen)))


@given(chosen=CHOSEN, failure=st.sampled_from(sorted(FAILURES)))
def test_a_failure_at_the_end_never_leaves_more_than_its_rung(chosen: list[int], failure: str) -> None:
    demoting, limit = FAILURES[failure]

    found = climb(*(POOL[place] for place in chosen), demoting)

    assert found is None or found.rung <= limit


@given(order=st.permutations(range(len(WHOLE))))
def test_the_order_of_passing_records_does_not_matter(order: list[int]) -> None:
    assert rung(*(WHOLE[place] for place in order)) == 4


# -- through real files ------------------------------------------------------------------------------------------------
def written(folder: Path, made: Make) -> Path:
    """The same evidence as a real record kept under a records folder."""
    item = made("0")
    document = dict(item.document)
    end = {key: document.pop(key) for key in ("valid", "null_valid", "served", "report") if key in document}
    if item.kind == "bench":
        document |= {"scenario": "decode", "arms": [], "schedule": [], "seed": 1}
        end |= {"checks": [], "results": []}
    with RecordWriter(item.kind, document, folder / "local") as record:
        record.append(item.rows)
        path = record.finish(end)
    return keep(path, folder)


def test_records_of_every_kind_written_and_kept_lead_to_rung_4(tmp_path: Path) -> None:
    write_suite(tmp_path / "fixtures" / "smol")
    for expected, made in zip((1, 2, 2, 3, 3, 4), WHOLE, strict=True):
        path = written(tmp_path, made)
        [found] = ladder(tmp_path)
        assert found.rung == expected

    assert (found.model, found.architecture, found.sha256, found.device_class) == ("smol", "llama", SHA, "cpu")
    assert found.proofs[-1].path == path.relative_to(tmp_path).as_posix()
    assert (tmp_path / found.proofs[0].path).is_file()


def test_local_and_incomplete_records_are_not_evidence(tmp_path: Path) -> None:
    written(tmp_path, INSPECT).unlink()
    with RecordWriter("inspect", {"device_class": "cpu", "model": MODEL}, tmp_path / "inspect") as record:
        record.finish({"report": {"errors": []}}, complete=False)

    assert ladder(tmp_path) == []
    assert ladder(tmp_path / "nowhere") == []


# -- the whole suite ---------------------------------------------------------------------------------------------------
PAIRS = frozenset({("capital", "generate"), ("emoji", "in_process"), ("capital", "http_chat")})
SUITE = {"smol": Suite(PAIRS)}


def rung_of(*makes: Make) -> LadderRow:
    [found] = compute([made(f"{place:026d}") for place, made in enumerate(makes)], SUITE)
    return found


@pytest.mark.parametrize(
    ("rows", "rung", "missing"),
    [
        ([row("generate")], 2, "lacks case emoji of the suite"),
        ([row("generate"), row("in_process", case="emoji", outcome="NOT JUDGED")], 2, "lacks case emoji of the suite"),
        ([row("generate"), row("in_process", case="emoji")], 4, ""),
    ],
)
def test_a_golden_record_of_a_part_of_the_suite_proves_no_rung(
    rows: list[dict[str, Any]], rung: int, missing: str
) -> None:
    found = rung_of(INSPECT, PARITY, make("golden", rows), TIMED, HTTP, SERVED)

    assert found.rung == rung
    assert missing in found.missing


def test_a_served_record_of_a_part_of_the_suite_proves_nothing_of_the_server() -> None:
    suite = {"smol": Suite(PAIRS | {("long-prompt", "http_completions")})}
    makes = [INSPECT, PARITY, make("golden", [row("generate"), row("in_process", case="emoji")]), TIMED, HTTP, SERVED]
    [found] = compute([made(f"{place:026d}") for place, made in enumerate(makes)], suite)

    assert found.rung == 3
    assert "lacks case long-prompt of the suite" in found.missing


def test_a_later_record_of_one_case_does_not_hide_the_one_of_the_whole_suite() -> None:
    whole = make("golden", [row("generate"), row("in_process", case="emoji")])

    assert rung_of(INSPECT, PARITY, whole, TIMED, HTTP, SERVED, make("golden", [row("generate")])).rung == 4


def test_the_suite_is_read_from_the_fixtures_beside_the_records(tmp_path: Path) -> None:
    folder = tmp_path / "fixtures" / "smol"
    write_suite(folder)
    (folder / "capital.cpu.json").write_text('{"case": "capital", "expected": {}}')

    [(name, suite)] = suites_of(tmp_path).items()
    assert (name, suite.lacks) == ("smol", ())
    assert suite.pairs >= {("capital", "generate"), ("capital", "http_chat")}
    assert len(suite.pairs) == len(CASES) + 1

    (folder / "torn.json").write_text("{")
    with pytest.raises(RecordError, match=r"cannot read the fixture torn\.json"):
        suites_of(tmp_path)


@pytest.mark.parametrize(
    ("left_out", "lacks"),
    [
        ("long", ("a prompt of several prefill chunks", "64 decode steps")),
        ("emoji", ("text beyond ASCII",)),
        ("stop", ("a stop string",)),
        ("sampled", ("a sampled case with a seed",)),
        ("turn", ("a second turn",)),
    ],
)
def test_a_suite_says_which_kind_of_case_it_leaves_out(left_out: str, lacks: tuple[str, ...]) -> None:
    assert suite_of([case for name, case in CASES.items() if name != left_out]).lacks == lacks


def test_a_model_without_a_chat_needs_no_second_turn() -> None:
    assert suite_of([case for case in CASES.values() if "messages" not in case]).lacks == ()


def test_a_suite_with_a_gap_and_no_suite_at_all_prove_no_golden_rung() -> None:
    evidence = [made(f"{place:026d}") for place, made in enumerate(WHOLE)]
    [gap] = compute(evidence, {"smol": Suite(CAPITAL["smol"].pairs, ("a stop string",))})
    [none] = compute(evidence, {"another": CAPITAL["smol"]})

    assert (gap.rung, gap.missing) == (2, "fixtures with a stop string")
    assert (none.rung, none.missing) == (2, "accepted fixtures of this model")


def test_a_run_with_an_arm_slowed_on_purpose_proves_nothing_of_the_model() -> None:
    slowed = [{"name": "base", "options": {}}, {"name": "slow", "options": {"test_step_delay": 0.05}}]

    assert rung(INSPECT, PARITY, GENERATE, make("bench", **BENCH, arms=slowed)) == 2
    assert rung(INSPECT, PARITY, GENERATE, make("bench", **BENCH, arms=slowed[:1])) == 3


def test_calibrations_and_imported_runs_make_no_row_of_the_ladder() -> None:
    assert compute([make("calibration")("1"), make("imported")("2")], CAPITAL) == []
