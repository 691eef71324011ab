"""The page, the pictures and the words of other tools: drawn from records, whatever is in them."""

import copy
import json
import re
from collections.abc import Mapping
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from pocketllm.bench.latency import Timing
from pocketllm.bench.reports import words
from pocketllm.bench.reports.comparison import render_view
from pocketllm.bench.reports.html import drawing
from pocketllm.bench.reports.html.page import render_page
from pocketllm.bench.reports.plots import render_plot
from pocketllm.bench.reports.series import Bar, Series, Spread, Strip
from pocketllm.bench.reports.text import axis_reach, plain, render
from pocketllm.bench.reports.views import VIEWS, view
from pocketllm.cli.main import app
from pocketllm.errors import OptionError
from pocketllm.evidence.store import Record, load_record

RECORDS = Path(__file__).resolve().parents[2] / "records" / "bench"
KEPT = sorted(RECORDS.rglob("*.parquet"))
THREE_ARMS = next(path for path in KEPT if path.stem == "01M8M9MP3WFTG3GH44P79TV3GR")
NASTY = """<script>alert("1")</script>'&"""
ASKS_A_SERVER = re.compile(r"""(?:src|href)\s*=|url\(|@import|<script|<link|<iframe""", re.IGNORECASE)


class Reader(HTMLParser):
    """Tags, attributes and text of a page, as a browser sees them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def record() -> Record:
    return load_record(THREE_ARMS)


def changed(record: Record, **changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(record.document), **changes}


def rows_with_points(record: Record, scenario: str, labels: tuple[str, ...]) -> list[dict[str, Any]]:
    """The record's rows once for each label, later ones slower."""
    rows = []
    for number, label in enumerate(labels):
        for row in record.row_dicts:
            stamps = row["chunk_t_ns"] or []
            later = [stamp + number * (stamp - stamps[0]) for stamp in stamps]
            rows.append({**row, "point": label, "chunk_t_ns": later, "t_last_ns": later[-1] if later else None})
    return rows


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem[-8:])
def test_every_kept_record_renders_as_text_page_and_views(path: Path) -> None:
    kept = load_record(path)
    page = render_page(kept.document, kept.row_dicts, list(VIEWS))

    assert kept.run_id in page
    for arm in kept.document["arms"]:
        assert arm["name"] in page
    assert max(map(len, render(kept.document, plain, kept.row_dicts).splitlines())) <= 80
    for name in VIEWS:
        text = render_view(Series(kept.document, kept.row_dicts), name, plain, 80)
        assert text.startswith(f"as {name}")
        assert max(map(len, text.splitlines())) <= 80


def test_the_page_needs_no_file_and_no_server(record: Record) -> None:
    page = render_page(record.document, record.row_dicts, list(VIEWS))

    assert ASKS_A_SERVER.findall(page) == []
    assert {"svg", "table", "style"} <= set(Reader(page).tags)


def test_the_check_itself_catches_what_asks_a_server() -> None:
    for harmful in ('<img src="x">', "<a href='x'>", "background: url(x)", "@import 'x'", "<script>", "<link rel=x>"):
        assert ASKS_A_SERVER.search(harmful)


@pytest.mark.parametrize("place", ["arm", "model", "scenario", "detail", "note", "option", "argv"])
def test_nothing_in_a_record_becomes_part_of_the_page_s_code(record: Record, place: str) -> None:
    document = changed(record)
    rows = copy.deepcopy(record.row_dicts)
    match place:
        case "arm":
            old = document["arms"][1]["name"]
            text = json.dumps(document, ensure_ascii=False).replace(json.dumps(old), json.dumps(NASTY))
            document = json.loads(text)
            rows = [{**row, "arm": NASTY if row["arm"] == old else row["arm"]} for row in rows]
        case "model":
            document["model"]["name"] = NASTY
        case "scenario":
            document["scenario"] = NASTY
        case "detail":
            document["checks"][0]["detail"] = NASTY
        case "note":
            document["notes"] = [NASTY]
        case "option":
            document["arms"][1]["options"] = {NASTY: NASTY}
        case "argv":
            document["argv"] = ["pocketllm", NASTY]
    page = render_page(document, rows, ["vllm"])
    read = Reader(page)

    assert "script" not in read.tags
    assert not any(name.startswith("on") for name, _ in read.attributes)
    assert "<script>" not in page
    assert any("alert(" in text for text in read.text)


def test_a_page_tells_the_verdict_and_the_ratio_of_the_record(record: Record) -> None:
    text = " ".join(" ".join(Reader(render_page(record.document, record.row_dicts)).text).split())

    result = next(r for r in record.document["results"] if r["verdict"])
    assert words.sentence(record.document, result) in text
    assert f"{words.short(1 / result['ratio'])}× speed" in text


def test_an_invalid_run_is_told_on_top_and_shows_no_ratio(record: Record) -> None:
    checks = [{"code": "V05", "severity": "run", "value": 0.1, "detail": "the null arm differs"}]
    page = render_page(changed(record, valid=False, checks=checks), record.row_dicts)

    assert "INVALID, nothing is concluded: V05 the null arm differs." in page
    assert "no ratio" in page
    assert words.short(record.document["results"][0]["ratio"]) + "×" not in page


def test_an_unfinished_run_renders_with_what_it_has(record: Record) -> None:
    ended = ("results", "checks", "medians", "valid", "null_valid", "valid_blocks", "notes", "wall_s", "blocks")
    document = {key: value for key, value in changed(record, complete=False).items() if key not in ended}
    some = record.row_dicts[:30]

    page, text = render_page(document, some, ["vllm"]), render(document, plain, some)

    told = "The run did not come to its end"
    assert told in page
    assert told in " ".join(text.split())
    assert re.search(r"^decode, tok/s +10\.\d +120\.\d +10\.\d$", text, re.MULTILINE)
    assert "4 of 12 blocks × 3 arms" in text
    assert "Over time" in page
    assert "Block by block" not in page


def test_a_journal_without_a_single_row_still_renders(record: Record) -> None:
    ended = ("results", "checks", "medians", "valid", "null_valid")
    document = {key: value for key, value in record.document.items() if key not in ended}

    assert "decode" in render_page(document, [])
    assert "decode" in render(document)
    with pytest.raises(OptionError, match="nothing to draw"):
        render_plot(Series(document, []), "png")


def test_points_of_a_scenario_become_curves_in_the_units_people_use(record: Record) -> None:
    rows = rows_with_points(record, "concurrency", ("1", "2", "4"))
    series = Series(changed(record, scenario="concurrency"), rows)
    curves = series.curves()

    assert list(curves) == ["throughput", "ttft", "tpot"]
    assert [one.label for one in curves["tpot"] if one.arm == "ours"] == ["1", "2", "4"]
    costs = [one.median for one in curves["tpot"] if one.arm == "ours"]
    assert costs == pytest.approx([costs[0], 2 * costs[0], 3 * costs[0]])
    page = render_page(series.document, rows)
    assert "throughput, tok/s" in page
    assert "in flight at 4" in render(series.document, plain, rows)


def calls_of(record: Record, case: str) -> list[dict[str, Any]]:
    return [
        {**row, "prompt_id": case, "t_send_ns": 0, "chunk_t_ns": [1000, 2000], "chunk_ntok": [1, 1]}
        for row in record.row_dicts
    ]


def test_operations_are_held_against_the_ceilings_of_the_same_run(record: Record) -> None:
    calls = calls_of(record, "add ×1")
    meter = {
        "cases": {"add ×1": {"bytes": 20_000.0, "flops": 0.0}},
        "ceilings": {"read_gbs": 40.0, "matmul_gflops": 90.0},
    }
    document = changed(record, scenario="op_latency", meter={"ours": meter})

    text = render(document, plain, calls)

    assert "ceilings: 40.0 GB/s read, 90.0 GF/s float32; rates: ours" in text
    assert re.search(r"^add ×1 +1\.00 +1\.00 +20\.0 GB/s +50%$", text, re.MULTILINE)
    assert "50%" in render_page(document, calls)


@pytest.mark.parametrize(("flops", "rate"), [(1e6, "3.00 TB/s +75%"), (3.6e8, "360 TF/s +90%")])
def test_an_operation_of_a_device_is_told_by_its_nearest_ceiling_and_beside_another_library(
    record: Record, flops: float, rate: str
) -> None:
    name = "project Q4_K 4096→14336 ×32"
    known = {"op": "project", "type": "Q4_K", "shape": "4096→14336", "rows": 32, "timed": "captured"}
    case = {**known, "bytes": 3e6, "flops": flops, "own_s": 2e-6, "peer_s": 5e-6}
    ceilings = {"copy_gbs": 4000.0, "bf16_gflops": 400_000.0}
    meter = {"cases": {name: case}, "ceilings": ceilings, "peer": "torch 2.11.0"}
    document, calls = changed(record, scenario="op_latency", meter={"ours": meter}), calls_of(record, name)

    text, page = render(document, plain, calls), render_page(document, calls)

    assert "ceilings: 4.00 TB/s copied, 400 TF/s bfloat16" in text
    assert re.search(rf"^project +Q4_K +4096→14336 +32 +1\.00 +1\.00 +{rate} +2\.50×$", text, re.MULTILINE)
    assert max(map(len, text.splitlines())) <= 80
    assert "2.50×" in page


def test_an_operation_that_was_no_part_of_a_launch_has_a_star(record: Record) -> None:
    case = {"op": "draw", "rows": 1, "bytes": 1.0, "flops": 0.0, "timed": "call by call"}
    meter = {"cases": {"draw ×1": case}, "peer": "torch 2.11.0"}
    document, calls = changed(record, scenario="op_latency", meter={"ours": meter}), calls_of(record, "draw ×1")

    assert re.search(r"^draw\* +1 +1\.00", render(document, plain, calls), re.MULTILINE)
    assert "draw*" in render_page(document, calls)


# -- other tools' words ------------------------------------------------------------------------------------------------
def one_request(chunks_ms: list[int], counts: list[int]) -> Series:
    row = {
        "phase": "measure",
        "block": 0,
        "arm": "a",
        "t_sched_ns": 0,
        "t_send_ns": 0,
        "t_first_ns": 100_000_000,
        "t_first_content_ns": chunks_ms[0] * 1_000_000,
        "t_last_ns": chunks_ms[-1] * 1_000_000,
        "chunk_t_ns": [at * 1_000_000 for at in chunks_ms],
        "chunk_ntok": counts,
        "srv_queue_s": None,
        "n_prompt": 50,
        "n_out": sum(counts),
        "error": None,
    }
    return Series({"scenario": "decode", "arms": [{"name": "a", "role": "baseline"}]}, [row])


def values(series: Series, name: str) -> dict[str, float]:
    return {row["name"]: row["value"] for row in view(series, name)}


def test_each_tool_s_numbers_of_one_request_are_its_own() -> None:
    series = one_request([200, 300, 600, 1000], [1, 1, 3, 2])

    vllm, sglang, guidellm = values(series, "vllm"), values(series, "sglang"), values(series, "guidellm")
    assert vllm["Mean TTFT"] == guidellm["TTFT"] == pytest.approx(100)
    assert sglang["Mean TTFT"] == values(series, "aiperf")["Time to first token"] == pytest.approx(200)
    assert vllm["Mean TPOT"] == sglang["Mean TPOT"] == guidellm["ITL"] == pytest.approx(800 / 6)
    assert guidellm["TPOT"] == pytest.approx(1000 / 7)
    assert vllm["Mean ITL"] == pytest.approx((100 + 300 + 400) / 3)
    assert sglang["Mean ITL"] == pytest.approx((100 + 3 * 100 + 2 * 200) / 6)
    assert values(series, "aiperf")["Inter token latency"] == pytest.approx(800 / 6)
    assert values(series, "aiperf")["Time to second token"] == pytest.approx(100)
    assert values(series, "llama-bench") == pytest.approx({"pp": 50 / 0.2, "tg": 6 / 0.8})
    assert vllm["Output token throughput"] == pytest.approx(7.0)


def test_ours_stands_beside_each_with_its_own_definition() -> None:
    row = next(row for row in view(one_request([200, 300, 600], [1, 1, 1]), "vllm") if row["name"] == "Mean ITL")

    assert (row["ours"], row["ours_unit"]) == ("itl", "ms")
    assert row["ours_value"] == pytest.approx(200)
    assert row["definition"] != row["ours_definition"]


def test_a_failed_request_has_no_part_in_another_tool_s_numbers() -> None:
    series = one_request([200, 300], [1, 1])
    bad = {**series.rows[0], "error": "HTTP 500", "chunk_t_ns": [9_000_000_000], "chunk_ntok": [1]}

    assert view(Series(series.document, [*series.rows, bad]), "vllm") == view(series, "vllm")


def test_quantiles_are_of_slots_and_never_pooled() -> None:
    series = one_request([100, 200], [1, 1])
    rows = [
        {**series.rows[0], "block": block, "t_send_ns": -block * 1_000_000} for block in range(60) for _ in range(2)
    ]

    [middle, p90, _] = Series(series.document, rows).quantiles("ttft", "", "a")

    assert middle.value == pytest.approx(0.1 + 0.0295)
    assert (p90.value, p90.refusal) == (None, "n/a (2 < 29)")


def test_requests_that_the_client_sent_late_are_shown_where_they_had_a_schedule() -> None:
    series = one_request([100, 200], [1, 1])
    late = {**series.rows[0], "t_sched_ns": -30_000_000}
    workload = {"points": [{"n_prompt": 50, "n_out": 2, "arrivals": "poisson", "num_requests": 1, "rate_per_s": 2.0}]}
    document = {**series.document, "workload": workload}

    assert re.search(r"^sent late +a +30\.0 ", render(document, plain, [late]), re.MULTILINE)
    assert "sent late" in render_page(document, [late])
    assert "sent late" not in render(series.document, plain, [late])


# -- drawings ----------------------------------------------------------------------------------------------------------
@given(st.floats(-3, 3), st.floats(0, 1), st.floats(0, 1), st.floats(0.001, 0.5))
def test_a_bar_s_parts_stand_in_order_inside_the_drawing(log: float, below: float, above: float, margin: float) -> None:
    import math

    result = {
        "arm": "b",
        "ratio": math.exp(log),
        "low": math.exp(log - below),
        "high": math.exp(log + above),
        "margin": margin,
        "floor": 0.002,
    }
    svg = drawing.forest_bar(result, axis_reach([result]), "arm-1")
    interval = re.search(r'class="interval[^"]*" x1="([\d.]+)%" x2="([\d.]+)%"', svg)
    dot = re.search(r'class="dot[^"]*" cx="([\d.]+)%"', svg)

    assert interval
    assert dot
    assert 0 <= float(interval[1]) <= float(dot[1]) <= float(interval[2]) <= 100


def test_the_panels_of_one_metric_have_one_scale(record: Record) -> None:
    page = render_page(record.document, record.row_dicts)
    panels = re.findall(
        r'aria-label="paired differences of (.*?) over.*?class="one"[^>]* y1="([\d.]+)"', page, re.DOTALL
    )

    assert sorted(arm for arm, _ in panels) == ["llama.cpp", "null"]
    assert len({height for _, height in panels}) == 1


@given(near=st.lists(st.floats(-0.1, 0.1), min_size=2), far=st.lists(st.floats(-5, 5), min_size=2))
def test_equal_differences_stand_at_equal_heights_in_every_panel(near: list[float], far: list[float]) -> None:
    result = {"arm": "b", "ratio": 1.0, "low": 0.99, "high": 1.01}
    panels = [(list(enumerate(values)), result) for values in ([*near, 0.05], [*far, 0.05])]
    drawn = [drawing.differences(points, result, "arm-1", drawing.span(panels)) for points, _ in panels]
    heights = [[float(height) for height in re.findall(r'cy="([\d.-]+)"', svg)] for svg in drawn]

    assert heights[0][-1] == heights[1][-1]
    assert all(0 <= height <= drawing.PANEL for panel in heights for height in panel)


@given(st.floats(0.0005, 7))
def test_an_axis_has_a_few_ticks_around_one(reach: float) -> None:
    import math

    ticks = drawing.ratio_ticks(reach)

    assert 1.0 in ticks
    assert ticks == sorted(ticks)
    assert len(ticks) in (3, 5)
    if reach > 0.002:
        assert all(abs(math.log(tick)) <= reach for tick in ticks)


@given(st.floats(1e-6, 1e9))
def test_a_curve_s_ticks_are_round_and_few(top: float) -> None:
    ticks = drawing.nice_ticks(top)

    assert 2 <= len(ticks) <= 6
    assert ticks[0] == 0
    assert ticks[-1] <= top * 1.000001


def test_drawings_of_flat_and_single_values_divide_by_nothing() -> None:
    result = {"arm": "b", "ratio": 1.0, "low": 1.0, "high": 1.0, "margin": 0.01}
    flat = Strip("CPU clock", "MHz", ((0.0, 2600.0), (1.0, 2600.0)))
    spread = Spread("1", "a", 0.5, 0.5, 0.5)
    points = [(0, 0.0), (1, 0.0)]

    assert "nan" not in drawing.differences(points, result, "arm-1", drawing.span([(points, result)]))
    assert "nan" not in drawing.strip(flat, 1.0)
    assert "nan" not in drawing.curve([spread], {"a": "arm-1"}, lambda cost: cost)
    assert "nan" not in drawing.lane([Bar(0, 0, 0, "a", 0.0, 0.0)], "a", 1.0, "arm-1")


def test_a_timeline_s_bars_follow_one_another(record: Record) -> None:
    bars = Series(record.document, record.row_dicts).timeline()

    assert [bar.slot for bar in bars] == list(range(36))
    assert bars[0].begin_s == 0
    assert all(before.end_s <= after.begin_s for before, after in pairwise(bars))


# -- pictures ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("kind", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_picture_is_the_same_each_time(record: Record, kind: str, begins: bytes) -> None:
    series = Series(record.document, record.row_dicts)
    first = render_plot(series, kind)

    assert first.startswith(begins)
    assert first == render_plot(series, kind)


def test_without_matplotlib_one_sentence_says_what_to_install(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)

    with pytest.raises(OptionError, match=r"pictures need matplotlib.*pip install 'pocketllm\[plots\]'"):
        render_plot(Series(record.document, record.row_dicts), "png")


# -- the command -------------------------------------------------------------------------------------------------------
def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "report", *arguments])


def test_the_command_prints_the_report_and_the_view(record: Record) -> None:
    answer = invoke(str(THREE_ARMS), "--as", "llama-bench")

    assert answer.exit_code == 0
    assert "llama.cpp decodes faster than ours" in answer.stdout
    assert "as llama-bench" in answer.stdout


def test_the_command_writes_page_and_pictures_and_a_json_document(record: Record, tmp_path: Path) -> None:
    page, png, svg = tmp_path / "a.html", tmp_path / "a.png", tmp_path / "a.svg"
    answer = invoke(
        str(THREE_ARMS), "--html", str(page), "--png", str(png), "--svg", str(svg), "--json", "--as", "vllm"
    )

    document: Mapping[str, Any] = json.loads(answer.stdout)
    assert document["record"] == record.run_id
    assert document["views"]["vllm"][0]["name"] == "Mean TTFT"
    assert page.read_text(encoding="utf-8") == render_page(record.document, record.row_dicts, ["vllm"])
    assert png.stat().st_size > 10_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "a.png", "a.svg"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([str(THREE_ARMS), "--as", "wrk"], "--as 'wrk': known are vllm, sglang, guidellm, aiperf, llama-bench"),
        ([str(THREE_ARMS), "--html", "/nowhere/a.html"], "cannot write --html /nowhere/a.html: there is no folder"),
        ([str(THREE_ARMS), "--html", "."], "cannot write --html .: it is a folder"),
        ([str(THREE_ARMS), "--svg", f"{THREE_ARMS}/a.svg"], f"cannot write --svg {THREE_ARMS}/a.svg: there is no"),
        (["nothing.parquet"], "no record file nothing.parquet"),
    ],
)
def test_what_cannot_be_done_is_told_in_one_sentence(arguments: list[str], told: str) -> None:
    answer = invoke(*arguments)

    assert answer.exit_code != 0
    assert answer.stderr.strip().splitlines()[-1].startswith(f"error: {told}")
    assert "Traceback" not in answer.stderr


def test_a_record_that_is_no_benchmark_is_named(record: Record) -> None:
    golden = min((RECORDS.parent / "golden").rglob("*.parquet"))
    answer = invoke(str(golden))

    assert answer.exit_code == 2
    assert "is of kind golden, not bench; `pocketllm records show` prints it" in answer.stderr


def test_a_timing_read_back_is_the_one_that_was_kept(record: Record) -> None:
    row = next(row for row in record.row_dicts if row["phase"] == "measure")
    timing = Timing.of_row(row)

    assert timing.chunk_t_ns == row["chunk_t_ns"]
    assert (timing.n_prompt, timing.n_out) == (128, 64)


def test_color_that_was_asked_for_survives_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    plainly = invoke(str(THREE_ARMS)).stdout
    monkeypatch.setenv("FORCE_COLOR", "1")
    brightly = invoke(str(THREE_ARMS)).stdout
    monkeypatch.setenv("NO_COLOR", "1")
    never = invoke(str(THREE_ARMS)).stdout

    assert "\033[" in brightly
    assert "\033[" not in plainly
    assert never == plainly
