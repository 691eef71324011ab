"""The report reads a document and nothing else; these are built by scripted runs."""

import copy
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pocketllm.bench.analysis.verdict import Word
from pocketllm.bench.reports import text as report
from pocketllm.bench.reports import words
from pocketllm.bench.reports.readable import check_readable
from pocketllm.bench.reports.text import colored, render, render_plan
from pocketllm.engine.options import EngineOptions
from pocketllm.errors import RecordError
from tests.unit.test_bench_run import Quiet, make_arms, run

ANSI = re.compile(r"\033\[[0-9;]*m")


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    return run(tmp_path_factory.mktemp("records")).document


def test_a_report_fits_80_columns_with_the_null_arm_on_top(document: Mapping[str, Any]) -> None:
    lines = render(document).splitlines()

    assert max(map(len, lines)) <= 80
    table = next(index for index, line in enumerate(lines) if line.startswith("arm "))
    assert lines[table + 2].startswith("decode, s/token against base ")
    assert lines[table + 3].startswith("null ")
    assert lines[table + 4].startswith("b ")
    assert lines[table + 4].endswith("SLOWER")


def test_a_wider_terminal_gives_its_columns_to_the_bars(document: Mapping[str, Any]) -> None:
    widest = {width: max(map(len, render(document, width=width).splitlines())) for width in (40, 80, 120, 400)}

    assert widest[40] <= 80
    assert 80 < widest[120] <= 120
    assert 120 < widest[400] <= 132


def test_in_a_pipe_every_sentence_is_a_line(document: Mapping[str, Any]) -> None:
    lines = render({**document, "notes": ["a word " * 30 + "and a last one"]}, width=None).splitlines()

    assert set(words.sentences(document)) <= set(lines)
    assert any(line.startswith("note: a word") and line.endswith("and a last one") for line in lines)
    assert max(len(line) for line in lines if "●" in line) <= 80


@pytest.mark.parametrize(
    ("points", "told"),
    [
        ([{"n_prompt": 8, "n_out": 4, "concurrency": 1}], "8 tokens in, 4 out, one request at a time"),
        (
            [{"n_prompt": 512, "n_out": 1, "concurrency": 1}, {"n_prompt": 2048, "n_out": 1, "concurrency": 1}],
            "512 and 2048 tokens in, 1 out, one request at a time",
        ),
        (
            [{"n_prompt": 8, "n_out": 4, "concurrency": level, "arrivals": "closed"} for level in (1, 2, 4)],
            "8 tokens in, 4 out, 1, 2 and 4 requests in flight",
        ),
        (
            [{"n_prompt": 8, "n_out": 4, "arrivals": "wave", "num_requests": 16}],
            "8 tokens in, 4 out, 16 requests arriving at once",
        ),
        (
            [{"n_prompt": 8, "n_out": 4, "arrivals": "poisson", "num_requests": 12, "rate_per_s": 2.0}],
            "8 tokens in, 4 out, 12 requests arriving by chance, 2 a second",
        ),
    ],
)
def test_the_head_tells_the_load_that_was_put_on(points: list[dict[str, Any]], told: str) -> None:
    assert words.load_words({"workload": {"points": points}}) == told
    assert words.load_words({}) == "lengths not recorded"


def test_a_percent_sign_is_never_left_alone_at_the_start_of_a_line() -> None:
    text = report.wrap("x" * 75 + " is 1.5 % of it")

    assert text.splitlines() == ["x" * 75 + " is", "1.5 % of it"]
    assert report.wrap("x" * 75 + " 1.5 %").splitlines() == ["x" * 75, "1.5 %"]


def test_both_readings_and_the_floor_stand_in_the_sentence(document: Mapping[str, Any]) -> None:
    text = " ".join(render(document).split())

    assert re.search(r"b decodes slower than base: 1\.2\d\d× time, 95 % CI 1\.\d{3}–1\.\d{3} \(0\.8\d\d× speed", text)
    assert re.search(r"12 blocks; null [+-]0\.\d % \(the same process relabelled; floor 0\.\d %\)", text)


def test_prefill_and_decode_rates_stand_apart(document: Mapping[str, Any]) -> None:
    text = render(document)

    assert re.search(r"^decode, tok/s +100\.\d +83\.\d +100\.\d$", text, re.MULTILINE)
    assert re.search(r"^prefill, tok/s +100\.\d +83\.\d +100\.\d$", text, re.MULTILINE)
    assert re.search(r"^first decode, ms +", text, re.MULTILINE)


def test_color_changes_nothing_but_color(document: Mapping[str, Any]) -> None:
    assert "\033[" not in render(document)
    assert ANSI.sub("", render(document, colored)) == render(document)
    assert "\033[31mSLOWER\033[0m" in render(document, colored)


def test_an_invalid_run_shows_no_ratio_of_a_candidate(tmp_path: Path) -> None:
    text = render(run(tmp_path, {"base": 0.01, "b": 0.012, "null": 0.0103}).document)

    assert "INVALID, nothing is concluded: V05" in text
    assert "1.20" not in text
    assert re.search(r"^b +– +– +– +INVALID$", text, re.MULTILINE)


def test_an_interrupted_run_shows_its_table_and_no_word(tmp_path: Path) -> None:
    text = render(run(tmp_path, progress=Quiet(stop_after=20)).document)

    assert "Interrupted: 6 whole blocks are kept, and no verdict is given." in text
    assert not any(word.value in text for word in Word)


def test_a_run_interrupted_at_once_still_reports(tmp_path: Path) -> None:
    assert "Interrupted: 0 whole blocks" in render(run(tmp_path, progress=Quiet(stop_after=1)).document)


def test_a_run_without_a_null_arm_says_why_there_is_no_verdict(tmp_path: Path) -> None:
    arm_set = make_arms(["base", "b:prefill_chunk=2"], EngineOptions(), with_null=False)

    assert "No null arm ran (--no-null)" in render(run(tmp_path, arm_set=arm_set, blocks=None).document)


@pytest.mark.parametrize("word", list(Word))
def test_every_word_has_a_sentence(document: Mapping[str, Any], word: Word) -> None:
    changed = copy.deepcopy(dict(document))
    result = next(r for r in changed["results"] if r["verdict"])
    result["verdict"] = word.value

    assert words.sentences(changed)[0].endswith(".")


def test_a_noisy_machine_is_told_plainly(document: Mapping[str, Any]) -> None:
    changed = copy.deepcopy(dict(document))
    result = next(r for r in changed["results"] if r["verdict"])
    result.update(verdict=Word.NOT_DISTINGUISHABLE.value, mde=0.08, blocks_to_resolve=96)

    assert "the machine was too noisy in this run to judge a change of 1.0 %; about 96 blocks would" in " ".join(
        words.sentences(changed)
    )
    result.update(blocks_to_resolve=None, starts_to_resolve=14)
    assert "about 14 starts would" in " ".join(words.sentences(changed))


def test_starts_are_named_where_they_are_the_sample(document: Mapping[str, Any]) -> None:
    changed = copy.deepcopy(dict(document))
    changed["isolation"] = "process"
    result = next(r for r in changed["results"] if r["verdict"])
    result.update(n=5, n_unit="start", starts_to_resolve=9, blocks_to_resolve=None, mde=0.08)
    result.update(verdict=Word.NOT_DISTINGUISHABLE.value, floor_source="90th percentile of 12 past null arms")

    text = words.sentences(changed)[0]

    assert "12 blocks, 5 starts; null" in text
    assert "(started separately; floor " in text
    assert ", 90th percentile of 12 past null arms)" in text
    assert "about 9 starts would" in text


@pytest.mark.parametrize("ratio", [0.001, 0.5, 0.999, 1.0, 1.3, 14.2, 900.0])
def test_a_bar_stays_inside_its_cells(ratio: float) -> None:
    result = {"ratio": ratio, "low": ratio * 0.7, "high": ratio * 1.4, "margin": 0.01}
    drawn = report.bar(result, report.axis_reach([result]))

    assert len(drawn) == report.BAR
    assert drawn[report.BAR // 2] in "│┼●"
    assert drawn.count("●") == 1


def test_long_names_and_wide_numbers_do_not_break_the_table(document: Mapping[str, Any]) -> None:
    changed = copy.deepcopy(dict(document))
    for item in [*changed["arms"], *changed["results"]]:
        for key in ("name", "arm"):
            if item.get(key) == "b":
                item[key] = "a-name-of-thirty-two-characters-"
    for result in changed["results"]:
        result.update(ratio=123.4, low=99.9, high=150.2)

    table = [line for line in render(changed).splitlines() if "●" in line]
    assert table
    assert max(map(len, table)) <= 80


def test_a_plan_shows_every_block_and_the_power() -> None:
    plan = {
        "scenario": "decode",
        "n_prompt": 1,
        "n_out": 8,
        "isolation": "toggle",
        "seed": 1,
        "time": "not known",
        "arms": [{"name": "a", "role": "baseline"}, {"name": "null", "role": "null"}],
        "schedule": [["a", "null"], ["null", "a"]],
        "mde": [{"sd": 0.01, "mde": 0.009}],
    }
    text = render_plan(plan)

    assert "2 blocks, 4 slots" in text
    assert "sd 1.0 %: 0.9 %" in text
    assert text.endswith("nothing was run")


# -- records of other versions -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("n", None, r"results\[\d\] has no n$"),
        ("floor", None, r"results\[\d\] has no floor$"),
        ("margin", None, r"results\[\d\] has no margin$"),
        ("low", 0, r"results\[\d\]\.low is 0, which is no time ratio"),
        ("high", math.inf, r"results\[\d\]\.high is inf, which is no time ratio"),
        ("margin", -1.5, r"results\[\d\]\.margin is -1\.5, which is no share"),
        ("metric", "prefill@9", "has a verdict, and no null arm beside it"),
    ],
)
def test_a_result_that_cannot_be_shown_is_refused_by_its_place(
    document: Mapping[str, Any], name: str, value: Any, told: str
) -> None:
    changed = copy.deepcopy(dict(document))
    check_readable(changed)
    result = next(r for r in changed["results"] if r["verdict"])
    result[name] = value

    with pytest.raises(RecordError, match=told):
        check_readable(changed)


def test_a_document_without_any_one_key_is_shown_or_refused(document: Mapping[str, Any]) -> None:
    places = [(None, key) for key in document] + [("results", key) for key in document["results"][0]]
    shown = 0
    for part, key in places:
        changed = copy.deepcopy(dict(document))
        for holder in [changed] if part is None else changed[part]:
            del holder[key]
        try:
            check_readable(changed)
        except RecordError:
            continue
        assert render(changed)
        shown += 1

    assert shown > 20
