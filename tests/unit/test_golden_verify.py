"""Verify with scripted entry points: which rows there are, what they end with, and what is written."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pocketllm.engine.options import EngineOptions
from pocketllm.errors import NotJudgedError, OptionError, RecordError
from pocketllm.evidence.store import read_record
from pocketllm.golden import verify as verifier
from pocketllm.golden.compare import Identical, NotJudged, Observed, Regression, Unrecorded
from pocketllm.golden.files.folder import FixtureFolder
from pocketllm.golden.fixture import Case, ServedPath
from pocketllm.golden.judging.gate import GateResult, ask_shortest
from pocketllm.golden.judging.judge import groups
from pocketllm.golden.judging.words import describe, explain
from pocketllm.golden.reports.text import as_json, grouped, headline, show
from pocketllm.golden.subject import Subject
from pocketllm.golden.verify import Report, VerifyOptions, verify_subject
from tests.unit.test_golden_compare import SERVED
from tests.unit.test_golden_fixture import ANSWER, CHAT, folder_with
from tests.unit.test_golden_http import scripted_server

LOCAL = replace(CHAT, paths=(ServedPath("in_process"), ServedPath("generate")))
MODEL = {
    "name": "smollm",
    "sha256": "a" * 64,
    "quant_types": ["F32", "Q4_1"],
    "tokenizer_sha256": "b" * 64,
    "template_sha256": "c" * 64,
}
PLAN = SimpleNamespace(
    device="cpu", device_name="x", backend="reference", numerics_version="1", as_dict=dict, options={}
)


def subject(**changes: Any) -> Subject:
    return Subject("smollm", Path("smollm.gguf"), {**MODEL, **changes}, PLAN, EngineOptions())  # type: ignore[arg-type]  # a stand-in, or wrong on purpose


class ScriptedEntryPoint:
    """Gives one observation, or raises one error, whatever it is asked."""

    def __init__(self, answer: Observed | Exception = SERVED) -> None:
        self._answer = answer
        self.asked: list[tuple[str, bool]] = []

    def answer(self, case: Case, is_stream: bool = False, on_first: Callable[[], None] | None = None) -> Observed:
        self.asked.append((case.name, is_stream))
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    def resume(self, case: Case, token_ids: tuple[int, ...], max_tokens: int) -> Observed:
        raise NotJudgedError("nobody goes on here")

    def score(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> tuple[float, ...] | None:
        return None


def play(monkeypatch: pytest.MonkeyPatch, answer: Observed | Exception = SERVED) -> ScriptedEntryPoint:
    entry_point = ScriptedEntryPoint(answer)

    @contextmanager
    def open_client(name: str, of: Subject) -> Iterator[ScriptedEntryPoint]:
        yield entry_point

    monkeypatch.setattr("pocketllm.golden.entry_points.open_client", open_client)
    return entry_point


def run(tmp_path: Path, of: Subject | None = None, **options: Any) -> Report:
    options = {"fixtures": tmp_path, "record_dir": tmp_path / "records", **options}
    return verify_subject(of or subject(), VerifyOptions(EngineOptions(), **options))


@pytest.fixture
def fixtures(tmp_path: Path) -> FixtureFolder:
    return folder_with(tmp_path, case=LOCAL)


@pytest.mark.parametrize(
    ("change", "outcome", "code"),
    [
        ({"prompt_token_ids": (*LOCAL.prompt_token_ids[:-1], 7)}, Regression, 1),
        ({"sampling": {"max_tokens": 3, "temperature": 0.0}}, Unrecorded, 4),
    ],
)
def test_a_case_changed_by_hand_is_red_where_its_prompt_ids_are_not_the_served_ones(
    change: dict[str, Any], outcome: type, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_with(tmp_path, case=replace(LOCAL, **change))
    play(monkeypatch)

    report = run(tmp_path, require=True)

    assert ([type(row.outcome) for row in report.rows], report.exit_code) == ([outcome, outcome], code)


def test_an_answer_that_comes_back_is_identical_through_every_path(
    tmp_path: Path, fixtures: FixtureFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch)

    report = run(tmp_path, require=True)

    assert [(str(row.path), row.outcome) for row in report.rows] == [
        ("in_process", Identical()),
        ("generate", Identical()),
    ]
    assert report.exit_code == 0


def test_the_run_record_holds_a_row_a_path(
    tmp_path: Path, fixtures: FixtureFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch, replace(SERVED, token_ids=(5, 99, 7)))

    report = run(tmp_path)

    assert report.record is not None
    record = read_record(report.record)
    assert record.complete
    assert record.document["model"]["sha256"] == "a" * 64
    rows = record.row_dicts
    assert [row["entry_point"] for row in rows] == ["in_process", "generate"]
    assert {(row["case"], row["check"], row["outcome"], row["position"]) for row in rows} == {
        ("capital", "tokens", "REGRESSION", 1)
    }
    assert rows[0]["regret"] == float("inf")
    assert rows[0]["fixture_sha256"] == fixtures.sha256("capital")


def test_verify_leaves_fixtures_alone(tmp_path: Path, fixtures: FixtureFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {file: file.read_bytes() for file in fixtures.path.iterdir()}
    play(monkeypatch, replace(SERVED, token_ids=(5, 99, 7)))

    assert run(tmp_path).exit_code == 1
    assert {file: file.read_bytes() for file in fixtures.path.iterdir()} == before


@pytest.mark.parametrize(
    ("mutate", "told"),
    [("id", "tokens at 1"), ("prompt-id", "prompt ids at 30"), ("logit", "logprobs of the recorded tokens moved")],
)
def test_a_mutated_copy_turns_red_and_leaves_no_record(
    tmp_path: Path, fixtures: FixtureFolder, monkeypatch: pytest.MonkeyPatch, mutate: Any, told: str
) -> None:
    play(monkeypatch)

    report = run(tmp_path, mutate=mutate)

    assert report.exit_code == 1
    assert report.record is None
    assert [describe(row.outcome).startswith(told) for row in report.rows] == [True, True]
    assert "on purpose" in headline(report)


def test_a_mutation_that_nobody_sees_is_not_judged(
    tmp_path: Path, fixtures: FixtureFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch, replace(SERVED, logprobs=None))

    report = run(tmp_path, mutate="logit")

    assert report.exit_code == 3
    assert report.notes[0] == (
        "not seen: the changed logit left capital in_process tokens, capital generate tokens green"
    )


def test_a_mutation_of_nothing_is_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    play(monkeypatch)

    report = run(tmp_path, mutate="id")

    assert report.exit_code == 3
    assert not report.rows


def test_ties_are_green_unless_they_are_not_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    close = replace(ANSWER.positions[1], margin=1e-6, top_logprobs=(-0.5, -0.500001))
    positions = (ANSWER.positions[0], close, ANSWER.positions[2])
    folder_with(tmp_path, case=LOCAL, answer=replace(ANSWER, positions=positions))
    entry_point = play(monkeypatch, replace(SERVED, token_ids=(5, 8, 7)))
    rest = Observed(token_ids=(7,), logprobs=(-0.3,))
    monkeypatch.setattr(type(entry_point), "resume", lambda *_: rest)

    plain, strict = run(tmp_path), run(tmp_path, strict_ties=True)

    assert [row.outcome.word for row in plain.rows] == ["TIE", "TIE"]
    assert (plain.exit_code, strict.exit_code) == (0, 1)
    assert plain.record is not None
    assert [row["regret"] for row in read_record(plain.record).row_dicts] == [pytest.approx(1e-6)] * 2


def test_concurrency_replaces_what_the_paths_say(tmp_path: Path) -> None:
    paths = (ServedPath("http_chat"), ServedPath("http_chat", True, 2), ServedPath("http_chat", is_warm=True))
    case = replace(CHAT, paths=(*paths, ServedPath("generate")))
    options = VerifyOptions(EngineOptions(), concurrency=4)

    assert [str(path) for path in verifier.selected_paths(case, options)] == [
        *("http_chat@4", "http_chat:stream@4", "http_chat:warm", "generate"),
    ]
    with pytest.raises(OptionError, match="--concurrency 9"):
        VerifyOptions(EngineOptions(), concurrency=9)


def test_other_weights_are_unrecorded_and_nothing_is_asked(
    tmp_path: Path, fixtures: FixtureFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry_point = play(monkeypatch)
    other = subject(sha256="e" * 64)

    report = run(tmp_path, other)

    assert [type(row.outcome) for row in report.rows] == [Unrecorded, Unrecorded]
    assert entry_point.asked == []
    required = run(tmp_path, other, require=True)

    assert report.exit_code == 0
    assert report.notes[0] == "2 of 2 answers are not recorded: that is a failure with --require, as in CI"
    assert (required.exit_code, required.notes) == (4, ())


def test_a_model_without_cases_says_so_and_passes_no_requirement(tmp_path: Path) -> None:
    report = run(tmp_path)

    assert (report.rows, report.exit_code) == ((), 0)
    assert "nothing was compared" in report.notes[0]
    assert "NOTHING COMPARED" in headline(report)
    assert run(tmp_path, require=True).exit_code == 4


def test_a_selection_without_paths_says_so(tmp_path: Path, fixtures: FixtureFolder) -> None:
    report = run(tmp_path, entry_points=("http_chat",), require=True)

    assert report.exit_code == 4
    assert "nothing was compared" in report.notes[0]


def test_an_unknown_case_or_entry_point_is_a_usage_error(tmp_path: Path, fixtures: FixtureFolder) -> None:
    with pytest.raises(RecordError, match=r"no case 'paris'.*capital"):
        run(tmp_path, cases=("paris",))
    with pytest.raises(OptionError, match=r"no entry point 'telnet'"):
        run(tmp_path, entry_points=("telnet",))
    with pytest.raises(OptionError, match=r"--url is asked over HTTP only"):
        run(tmp_path, entry_points=("generate",), url="http://127.0.0.1:1")
    with pytest.raises(OptionError, match=r"'localhost:8000' is no http address"):
        run(tmp_path, url="localhost:8000")
    with pytest.raises(OptionError, match=r"--served-model 'x' goes with --url"):
        run(tmp_path, served_model="x")
    with pytest.raises(OptionError, match=r"--engine 'x' goes with --url"):
        run(tmp_path, peer="x")


def test_an_entry_point_that_dies_is_not_judged(
    tmp_path: Path, fixtures: FixtureFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch, NotJudgedError("it died"))

    report = run(tmp_path)

    assert [row.outcome for row in report.rows] == [NotJudged("it died")] * 2
    assert grouped(report.rows) == {("all cases", NotJudged("it died")): ["in_process", "generate"]}
    assert report.exit_code == 3


HTTP = replace(CHAT, paths=(ServedPath("http_chat"), ServedPath("http_chat", True, 2)))


@pytest.mark.parametrize(
    "program", ["raise SystemExit('no port')", "import time; print('still loading'); time.sleep(60)"]
)
def test_a_server_that_never_gets_ready_is_not_judged_and_its_log_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    folder_with(tmp_path, case=HTTP)
    monkeypatch.setattr("pocketllm.golden.served_path.serve_command", lambda flags: [sys.executable, "-c", program])
    monkeypatch.setattr("pocketllm.golden.served_path.READY_TIMEOUT_S", 1.0)

    report = run(tmp_path)

    assert report.exit_code == 3
    assert [type(row.outcome) for row in report.rows] == [NotJudged, NotJudged]
    assert all(word in str(report.rows[0].outcome) for word in ("the end of its log",))


def foreign(text: str, streamed: str) -> Callable[[str, dict[str, Any]], tuple[int, bytes]]:
    """A server that shows no token ids."""

    def answer(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        if path == "/v1/models":
            return 200, b'{"data": [{"id": "peer"}]}'
        if not body["stream"]:
            message = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            return 200, json.dumps({"choices": [message]}).encode()
        chunks = [{"delta": {"content": streamed}, "finish_reason": None}, {"delta": {}, "finish_reason": "stop"}]
        lines = [json.dumps({"choices": [chunk]}) for chunk in chunks]
        return 200, "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]).encode()

    return answer


@pytest.mark.parametrize(
    ("text", "streamed", "code", "words"),
    [
        (SERVED.text, SERVED.text, 0, {"IDENTICAL"}),
        ("London", "London", 1, {"DIVERGED"}),
        (SERVED.text, "Par", 1, {"IDENTICAL", "REGRESSION"}),
    ],
    ids=["same text", "other text", "stream differs"],
)
def test_a_foreign_server_is_held_to_its_text(
    tmp_path: Path, text: str, streamed: str, code: int, words: set[str]
) -> None:
    folder_with(tmp_path, case=replace(CHAT, paths=(ServedPath("http_chat"), ServedPath("http_chat", True))))

    with scripted_server(foreign(text, streamed)) as url:
        report = run(tmp_path, url=url)

    assert {row.outcome.word for row in report.rows} == words
    assert report.exit_code == code
    assert "hard key of a server" in report.notes[0]


@pytest.mark.parametrize("ids", [(9, 9, 9), CHAT.prompt_token_ids], ids=["other prompt ids", "the recorded ones"])
def test_where_a_server_makes_other_prompt_ids_it_is_asked_whether_it_serves_that_model(
    tmp_path: Path, ids: tuple[int, ...]
) -> None:
    folder_with(tmp_path, case=replace(CHAT, paths=(ServedPath("http_chat"),)))

    def answer(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        status, told = foreign(SERVED.text, "")(path, body)
        document = json.loads(told)
        for choice in document.get("choices", []):
            choice["prompt_token_ids"] = ids
        return status, json.dumps(document).encode()

    with scripted_server(answer) as url:
        report = run(tmp_path, url=url)

    is_other = ids != CHAT.prompt_token_ids
    assert report.exit_code == is_other
    assert any(note.startswith(f"is it {report.subject.name} that is served") for note in report.notes) is is_other


def test_of_a_server_that_does_not_answer_nothing_else_is_said(tmp_path: Path) -> None:
    folder_with(tmp_path, case=replace(CHAT, paths=(ServedPath("http_chat"),)))

    report = run(tmp_path, url="http://127.0.0.1:1")

    assert {row.outcome.word for row in report.rows} == {"NOT JUDGED"}
    assert not any("server" in note for note in report.notes)


def test_jobs_are_grouped_and_what_is_left_over_is_asked_beside_itself() -> None:
    jobs: Any = ["a", "b", "c"]

    assert groups(jobs, 2) == [["a", "b"], ["c", "c"]]
    assert groups(jobs, 4) == [["a", "b", "c", "c"]]
    assert groups([], 2) == []


@pytest.mark.parametrize(("value", "is_ci"), [("true", True), ("1", True), ("false", False), ("0", False), ("", False)])
def test_ci_is_what_the_environment_says(monkeypatch: pytest.MonkeyPatch, value: str, is_ci: bool) -> None:
    monkeypatch.setenv("CI", value)

    assert verifier.is_ci() is is_ci
    assert VerifyOptions(EngineOptions()).writes_record is not is_ci
    assert VerifyOptions(EngineOptions(), record_dir=Path()).writes_record


# -- what a person reads -----------------------------------------------------------------------------------------------
def test_a_divergence_is_told_in_tokens_text_margin_and_regret() -> None:
    told = explain(Regression("tokens", "", 17, 284, 279, 3.1, float("inf")), {284: " the", 279: " a"}.__getitem__)

    assert told == (
        "tokens at 17: expected 284 ' the', served 279 ' a'; recorded lead of the most likely token 3.100 nat; "
        "served token outside the recorded top"
    )


def test_a_prompt_that_changed_names_its_cause() -> None:
    told = explain(Regression("prompt ids", "", 3, 1, None), str, "the template has changed")

    assert told == "prompt ids at 3: expected 1 '1', served the end; the template has changed"


def test_the_report_fits_80_columns_and_tells_each_finding_once(
    tmp_path: Path, fixtures: FixtureFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    play(monkeypatch, replace(SERVED, finish_reason="length"))
    report = run(tmp_path)
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115  # the console writes to it until the test ends
    show(report, console)
    text = console.export_text()

    assert list(grouped(report.rows).values()) == [["in_process", "generate"]]
    assert text.count("finish reason length, not stop") == 1
    assert "2 REGRESSION" in text
    assert max(len(line) for line in text.splitlines() if "record:" not in line) <= 80
    assert as_json(report)["counts"] == {"REGRESSION": 2}
    assert as_json(report)["exit_code"] == 1


def test_in_a_pipe_each_finding_is_a_line(
    tmp_path: Path,
    fixtures: FixtureFolder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    play(monkeypatch, replace(SERVED, finish_reason="a-reason-" * 12))
    show(run(tmp_path))
    lines = capsys.readouterr().out.split("\n")

    assert any(line.endswith(f"finish reason {'a-reason-' * 12}, not stop") for line in lines), lines
    assert max(map(len, lines)) < 1000


def test_a_server_that_is_not_there_is_said_first_whatever_is_recorded(tmp_path: Path) -> None:
    nobody, said = "http://127.0.0.1:1", "http://127.0.0.1:1 does not answer"
    nothing = run(tmp_path, url=nobody)
    case_file = FixtureFolder(tmp_path / "smollm").write_case(CHAT)
    case_file.rename(case_file.with_suffix(""))
    unrecorded = run(tmp_path, url=nobody)

    assert (nothing.rows, nothing.exit_code) == ((), 3)
    assert nothing.notes[0].startswith(said)
    assert unrecorded.exit_code == 3
    assert {describe(row.outcome)[: len(said)] for row in unrecorded.rows} == {said}


# -- the gate of a benchmark -------------------------------------------------------------------------------------------
def test_the_gate_says_what_it_compared(tmp_path: Path, fixtures: FixtureFolder) -> None:
    def gate(of: Subject, answer: Observed = SERVED) -> GateResult:
        return ask_shortest(of, ScriptedEntryPoint(answer), ("in_process",), tmp_path)

    assert gate(subject()).outcome == Identical()
    assert isinstance(gate(subject(), replace(SERVED, token_ids=(1,))).outcome, Regression)
    missing = gate(subject(sha256="e" * 64))
    assert isinstance(missing.outcome, Unrecorded)
    assert missing.detail.startswith("tokens not compared")
    assert ANSWER.case in gate(subject()).detail
