"""What a recording measures and refuses, what a peer's recording can hold, suggestions, and what is pruned."""

import json
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from pocketllm.cli.main import app
from pocketllm.engine.load import Engine
from pocketllm.errors import OptionError, RecordError
from pocketllm.evidence.store import read_record
from pocketllm.golden.compare import Diverged, Identical
from pocketllm.golden.files.folder import FixtureFolder
from pocketllm.golden.judging.judge import ServerAt
from pocketllm.golden.recording.accept import accept, prune
from pocketllm.golden.recording.peer import record_peer
from pocketllm.golden.recording.record import check_margin, record, request
from pocketllm.golden.recording.suggest import requests_of, suggest
from pocketllm.golden.reports.text import headline, prompt_cause
from pocketllm.golden.subject import open_subject, subject_of
from pocketllm.golden.verify import VerifyOptions, verify_subject
from tests.golden.workshop import GREEDY, opened, options, record_cases, verified, words
from tests.served.conftest import Served
from tests.unit.test_golden_http import scripted_server

PROMPT = (
    "Once upon a time there was a prompt of more than sixty-four tokens, which is why it goes on and on and on " * 2
)
TABLE = {"purpose": "a test", "prompt": PROMPT, "sampling": {"max_tokens": 8, **GREEDY}}


@pytest.fixture(scope="module")
def engine(tiny_gguf: Path) -> Iterator[Engine]:
    with opened(tiny_gguf) as loaded:
        yield loaded


# -- noise -------------------------------------------------------------------------------------------------------------
def test_a_recording_varies_what_may_change_and_keeps_its_own_run_record(engine: Engine, tmp_path: Path) -> None:
    subject = subject_of(engine)
    folder = FixtureFolder(tmp_path / subject.name)

    [proposal] = record(subject, folder, [request("new", TABLE, "x")], ["pocketllm"], record_dir=tmp_path / "records")

    noise = proposal.answer.noise
    assert noise.variations == ("warm cache", "scored", "width 2", "prefill chunk 64", "threads 1", "threads 2")
    assert noise.repeats == 3
    assert noise.is_bit_identical
    assert 0 <= noise.floor.mean <= noise.floor.p99 < 1e-4
    assert noise.reference is None
    backing = read_record(proposal.answer.provenance["record"], [tmp_path / "records"])
    assert backing.complete
    [row] = backing.row_dicts
    assert (row["case"], row["outcome"], row["dlogprob_p99"]) == ("new", "IDENTICAL", noise.floor.p99)
    assert all(len(position.top_ids) == 20 for position in proposal.answer.positions)


def test_an_answer_that_could_be_another_is_refused_unless_it_is_there_for_that(engine: Engine, tmp_path: Path) -> None:
    subject = subject_of(engine)
    [proposal] = record(
        subject,
        FixtureFolder(tmp_path / subject.name),
        [request("new", TABLE, "x")],
        ["pocketllm"],
        record_dir=tmp_path / "records",
    )
    first, *rest = proposal.answer.positions
    shaky = replace(proposal.answer, positions=(replace(first, margin=1e-5), *rest))

    with pytest.raises(RecordError, match="below 3 τ"):
        check_margin(proposal.case, shaky)
    check_margin(replace(proposal.case, tags=("tie-probe",)), shaky)
    check_margin(proposal.case, proposal.answer)


# -- suggestions -------------------------------------------------------------------------------------------------------
def test_a_case_that_cannot_be_asked_is_named(engine: Engine, tmp_path: Path) -> None:
    subject = subject_of(engine)
    endless = {**TABLE, "sampling": {"max_tokens": 10**6, **GREEDY}}

    with pytest.raises(RecordError, match=r"^case endless: the prompt's .* lower max_tokens"):
        record(
            subject,
            FixtureFolder(tmp_path / subject.name),
            [request("new", TABLE, "x"), request("endless", endless, "x")],
            ["pocketllm"],
            record_dir=tmp_path / "records",
        )


def test_suggestions_are_ranked_by_their_smallest_margin(engine: Engine) -> None:
    asked = requests_of(["once upon", "", "hello", "日本"], is_chat=False, max_tokens=6, is_probe=False)

    found = suggest(subject_of(engine), asked)

    clear = [one.margin for one in found if not one.is_refused]
    assert clear == sorted(clear, reverse=True)
    assert len(found) == 3
    assert {one.case.name for one in found} == {"once-upon", "hello", "prompt-3"}
    first = found[0].answer.positions[0]
    shaky = replace(found[0], answer=replace(found[0].answer, positions=(replace(first, margin=0.0),)))
    assert shaky.is_refused
    assert not replace(shaky, case=replace(shaky.case, tags=("tie-probe",))).is_refused


def test_an_answer_that_ends_at_once_is_refused_with_the_reason_however_clear_it_is(engine: Engine) -> None:
    asked = requests_of(["once upon"], is_chat=False, max_tokens=6, is_probe=True)
    [found] = suggest(subject_of(engine), asked)
    expected = replace(found.answer.expected, text="", token_ids=found.answer.expected.token_ids[:1])
    empty = replace(found, answer=replace(found.answer, expected=expected))

    assert (found.is_refused, found.as_dict()["reason"]) == (False, None)
    assert empty.is_refused
    assert "ends at once and has no text" in empty.as_dict()["reason"]


def test_a_case_with_a_prompt_and_messages_is_told_that_they_exclude_each_other() -> None:
    table = {**TABLE, "prompt": "a", "messages": [{"role": "user", "content": "a"}]}

    with pytest.raises(RecordError, match=r"x: \[new\]: prompt: excludes messages"):
        request("new", table, "x")


def test_nothing_to_try_is_refused() -> None:
    with pytest.raises(RecordError, match="one a line"):
        requests_of(["", "  "], is_chat=False, max_tokens=6, is_probe=False)


# -- another engine's goldens ------------------------------------------------------------------------------------------
PATHS = ["http_completions", "http_completions:stream"]


def test_a_server_is_recorded_under_its_engines_name_and_held_to_that(tiny_gguf: Path, tmp_path: Path) -> None:
    subject = open_subject(options(tiny_gguf), "other-engine")
    folder = FixtureFolder(tmp_path / subject.name)
    with opened(tiny_gguf) as engine:
        server = Served(engine)
        try:
            asked = [request("new", {**TABLE, "paths": PATHS}, "x")]
            [proposal] = record_peer(
                subject, folder, asked, ServerAt(server.url), ["pocketllm"], record_dir=tmp_path / "records"
            )
            for file in proposal.files:
                file.rename(str(file).removesuffix(".pending"))
            settings: dict[str, Any] = {"fixtures": tmp_path, "record_dir": tmp_path / "runs", "require": True}
            engine_options = options(tiny_gguf)
            own = verify_subject(
                subject, VerifyOptions(engine_options, url=server.url, peer="other-engine", **settings)
            )
            ours = verify_subject(
                open_subject(engine_options), VerifyOptions(engine_options, url=server.url, **settings)
            )
        finally:
            server.stop()

    assert proposal.answer.hard_key.label == "url-other-engine"
    assert proposal.files[-1].name == "new.url-other-engine.json.pending"
    assert len(proposal.answer.positions) == 8
    assert set(words(own).values()) == {"IDENTICAL"}
    assert set(words(ours).values()) == {"UNRECORDED"}
    assert (own.exit_code, ours.exit_code) == (0, 4)


def text_only(text: str) -> Any:
    """A server of another engine: no ids, no logprobs, and it says so when it is asked for them."""

    def answer(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        if path == "/v1/models":
            return 200, b'{"data": [{"id": "peer"}]}'
        refused = [name for name in ("return_token_ids", "logprobs", "prompt_logprobs") if name in body]
        if refused:
            return 400, json.dumps({"error": {"message": f"unknown field {refused[0]}"}}).encode()
        usage = {"prompt_tokens": 3, "completion_tokens": 4}
        return 200, json.dumps({"choices": [{"text": text, "finish_reason": "length"}], "usage": usage}).encode()

    return answer


def test_a_server_that_shows_only_text_is_held_to_its_text(tiny_gguf: Path, tmp_path: Path) -> None:
    subject = open_subject(options(tiny_gguf), "llama.cpp")
    folder = FixtureFolder(tmp_path / subject.name)
    asked = [request("new", {**TABLE, "paths": PATHS[:1]}, "x")]
    with scripted_server(text_only("Paris")) as url:
        [proposal] = record_peer(subject, folder, asked, ServerAt(url), ["pocketllm"], record_dir=tmp_path / "records")
    for file in proposal.files:
        file.rename(str(file).removesuffix(".pending"))
    assert (proposal.answer.expected.token_ids, proposal.answer.positions) == ((), ())
    assert proposal.case.prompt_token_ids == subject.prompts.token_ids(proposal.case)

    outcomes = []
    for text in ("Paris", "London"):
        with scripted_server(text_only(text)) as url:
            settings = VerifyOptions(
                options(tiny_gguf), url=url, peer="llama.cpp", fixtures=tmp_path, record_dir=tmp_path
            )
            report = verify_subject(subject, settings)
        outcomes.append([row.outcome for row in report.rows])

    assert outcomes[0] == [Identical("text")]
    assert [type(one) for one in outcomes[1]] == [Diverged]


def test_a_server_that_refuses_or_changes_its_mind_is_not_recorded(tiny_gguf: Path, tmp_path: Path) -> None:
    subject = open_subject(options(tiny_gguf), "llama.cpp")
    folder = FixtureFolder(tmp_path / subject.name)
    asked = [request("new", {**TABLE, "paths": PATHS[:1]}, "x")]
    texts = iter(["a", "b", "c"])
    servers = [
        (lambda path, body: (500, b"broken"), "HTTP 500: broken"),
        (lambda path, body: text_only(next(texts))(path, {}), "3 repeats gave different answers"),
    ]
    for script, told in servers:
        with scripted_server(script) as url, pytest.raises(RecordError, match=told):
            record_peer(subject, folder, asked, ServerAt(url, model="peer"), [], record_dir=tmp_path / "records")
    alone = [request("new", {**TABLE, "paths": ["in_process"]}, "x")]
    with pytest.raises(RecordError, match="no http path"):
        record_peer(subject, folder, alone, ServerAt("http://127.0.0.1:9"), ["pocketllm"], record_dir=tmp_path)
    assert folder.pending_names() == []


def test_a_name_that_is_no_file_name_is_refused(tiny_gguf: Path) -> None:
    with pytest.raises(OptionError, match="must be a name of lower-case letters"):
        open_subject(options(tiny_gguf), "../x")


# -- the commands ------------------------------------------------------------------------------------------------------
def command(*said: str, **environment: str | None) -> Result:
    return CliRunner().invoke(app, ["golden", *said], env={"CI": None, "GITHUB_ACTIONS": None, **environment})


@pytest.fixture
def recorded(engine: Engine, tmp_path: Path) -> Path:
    record_cases(engine, tmp_path / "goldens", {"new": {**TABLE, "paths": ["in_process"]}})
    return tmp_path / "goldens"


def test_the_commands_that_a_recording_names_find_what_it_proposed(tiny_gguf: Path, tmp_path: Path) -> None:
    cases = tmp_path / "cases.toml"
    cases.write_text(
        f'[new]\npurpose = "a test"\nprompt = "{PROMPT}"\npaths = ["in_process"]\n'
        "[new.sampling]\nmax_tokens = 8\ntemperature = 0.0\nignore_eos = true\n"
    )
    said = ["--model", str(tiny_gguf), "--fixtures", str(tmp_path / "gold"), "--backend", "reference"]

    told = command("record", str(cases), *said, "--record-dir", str(tmp_path / "runs"))
    assert told.exit_code == 0, told.output
    review, accept_all = told.stdout.splitlines()[-1].removeprefix("next: pocketllm golden ").split(", or: ")

    assert command(*shlex.split(review)).stdout.startswith("new · cpu-reference")
    assert shlex.split(accept_all)[-3:] == shlex.split(review)[-3:]
    assert accept_all.startswith("pocketllm golden accept --all --reason")


def test_a_case_of_ones_own_is_proposed_where_one_works_and_found_there(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = ["--model", str(tiny_gguf), "--backend", "reference"]
    asking = ["--case", "mine", "--prompt", PROMPT, "--purpose", "a test", "--max-tokens", "4"]

    told = command("record", *asking, *said)
    assert told.exit_code == 0, told.output
    assert [path.name for path in tmp_path.rglob("mine.json.pending")] == ["mine.json.pending"]
    assert command("review", *said).stdout.startswith("mine · cpu-reference")


def test_a_stale_answer_is_told_rejected_and_pruned(recorded: Path, engine: Engine, tiny_gguf: Path) -> None:
    folder = FixtureFolder(recorded / subject_of(engine).name)
    (folder.path / "new.json").rename(folder.path / "new.json.away")
    where = ["--model", str(tiny_gguf), "--fixtures", str(recorded)]

    warned = verified(engine, recorded)
    rejected = verified(engine, recorded, unreferenced="reject")
    listed = command("prune", *where)
    in_ci = command("prune", *where, "--yes", CI="1")
    with pytest.raises(RecordError, match="CI is set"):
        prune(folder.stale(), is_ci=True)
    still_there = [file.path.name for file in folder.stale()]
    done = command("prune", *where, "--yes")

    assert (warned.exit_code, rejected.exit_code) == (0, 5)
    assert [file.outcome.word for file in warned.stale] == ["STALE"]
    assert "there is no case 'new'" in listed.stdout
    assert "nothing is deleted yet" in listed.stderr
    assert (listed.exit_code, in_ci.exit_code, done.exit_code) == (0, 2, 0)
    assert still_there == ["new.cpu-reference.json"]
    assert folder.stale() == []


def test_show_lists_what_is_recorded_and_each_position(recorded: Path, tiny_gguf: Path) -> None:
    where = ["--model", str(tiny_gguf), "--fixtures", str(recorded)]

    everything, one = command("show", *where), command("show", *where, "--case", "new")
    document = json.loads(command("show", *where, "--json").stdout)

    assert "cpu-reference" in everything.stdout
    assert "a tie up to" in one.stdout
    assert "3 repeats bit-identical" in one.stdout
    assert len(document[0]["answers"][0]["positions"]) == 8
    assert command("show", *where, "--case", "nobody").exit_code == 2


def test_suggest_ranks_a_files_lines(tiny_gguf: Path, tmp_path: Path) -> None:
    long = "once upon a time " * 12 + "there was"
    (tmp_path / "prompts.txt").write_text(f"{long}\nhello\n", encoding="utf-8")
    words_said = ["suggest", str(tmp_path / "prompts.txt"), "--model", str(tiny_gguf), "--max-tokens", "4"]

    table, document = command(*words_said), command(*words_said, "--json")
    missing = command("suggest", str(tmp_path / "none.txt"), "--model", str(tiny_gguf))

    assert table.exit_code == 0, table.output
    assert len(json.loads(document.stdout)) == 2
    assert long in table.stdout, "a pipe gets whole lines"
    assert missing.exit_code == 2
    assert "give a file with a prompt a line" in missing.stderr


def test_url_and_engine_go_together_when_recording(tiny_gguf: Path) -> None:
    assert command("record", "--model", str(tiny_gguf), "--url", "http://127.0.0.1:9").exit_code == 2
    assert command("record", "--model", str(tiny_gguf), "--engine", "x").exit_code == 2


def test_a_missing_answer_is_a_failure_in_ci_unless_it_is_said_otherwise(tiny_gguf: Path, tmp_path: Path) -> None:
    said = ["verify", "--model", str(tiny_gguf), "--fixtures", str(tmp_path), "--record-dir", str(tmp_path / "runs")]

    at_a_desk, required = command(*said), command(*said, "--require")
    in_ci, let_pass = command(*said, CI="true"), command(*said, "--no-require", CI="true")

    assert [one.exit_code for one in (at_a_desk, required, in_ci, let_pass)] == [0, 4, 4, 0]
    assert "NOTHING COMPARED" in in_ci.stdout


def test_junit_annotations_and_step_summary_are_written_for_ci(recorded: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    said = ["verify", "--model", str(tiny_gguf), "--fixtures", str(recorded), "--backend", "reference"]
    said += ["--junit", str(tmp_path / "golden.xml"), "--github"]

    green = command(*said, GITHUB_STEP_SUMMARY=str(tmp_path / "summary.md"), CI="true")
    red = command(*said, "--mutate", "id", GITHUB_STEP_SUMMARY=str(tmp_path / "summary.md"), CI="true")

    assert (green.exit_code, red.exit_code) == (0, 1), red.output
    assert "::error" not in green.stdout
    assert "::error title=REGRESSION%3A llama new::" in red.stdout
    assert 'failures="1"' in (tmp_path / "golden.xml").read_text()
    summary = (tmp_path / "summary.md").read_text()
    assert summary.count("### pocketllm golden: llama on cpu-reference") == 2
    assert "| ❌ | new | REGRESSION |" in summary
    assert not list((recorded.parent).glob("**/records"))


def test_a_dirty_tree_is_named_for_it_may_not_be_the_working_directory_s(engine: Engine, tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    (tmp_path / "changed.py").write_text("")
    folder = FixtureFolder(tmp_path / "records" / "fixtures" / "tiny")

    with pytest.raises(RecordError) as caught:
        accept(subject_of(engine), folder, ["capital"], "a test", is_ci=False)

    assert f"the tree around {folder.path} is dirty: commit the code" in str(caught.value)
    assert str(caught.value).endswith("): changed.py")


def test_a_case_that_was_edited_is_said_to_be_the_cause_and_not_its_template_or_tokenizer(
    engine: Engine, tmp_path: Path
) -> None:
    folder = record_cases(engine, tmp_path / "fixtures", {"own": TABLE})
    file = folder.path / "own.json"
    file.write_text(file.read_text().replace("Once upon", "Once before", 1))
    report = verified(engine, tmp_path / "fixtures")
    assert "REGRESSION" in headline(report)

    assert "the case was changed after this answer was recorded" in prompt_cause(report, "own")
    assert "tokenizer" in prompt_cause(replace(report, stale=()), "own")
