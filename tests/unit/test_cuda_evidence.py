"""Evidence of a GPU that one has for a while: its order, what fits, what waits for a person. Without a GPU."""

import json
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cuda import children, evidence
from tests.cuda.bars import FILES, MORE
from tests.cuda.children import Ended, OnEnd
from tests.cuda.evidence import Evidence
from tests.cuda.evidence_steps import (
    ROWS,
    Part,
    Preparation,
    Stage,
    Step,
    alone,
    deal,
    models_part,
    operations_part,
    record_step,
    records_in,
    rows_part,
    those_that_fit,
    unrecorded,
)

FOLDER = Path("made")


class Machine:
    """Children that end at once by its own clock; outputs and exit codes by name, 0 and a record where none is said."""

    def __init__(self, logs: Path, said: Mapping[str, tuple[int | None, str]] = {}, factor: float = 1) -> None:
        self.logs, self.said, self.factor = logs, said, factor
        self.clock = 0.0
        self.began: list[list[str]] = []
        self.limits: list[float | None] = []

    def run(self, steps: Sequence[Step], limit_s: float | None, on_end: OnEnd) -> Mapping[str, Ended]:
        self.began.append([step.name for step in steps])
        self.limits.append(limit_s)
        self.clock += 40 * self.factor
        found = {}
        for step in steps:
            code, output = self.said.get(step.name, (0, f"record: records/local/{step.name}.parquet\n"))
            log = self.logs / f"{step.name}.txt"
            log.write_text(output)
            found[step.name] = Ended(code, 1.0, log)
            on_end(step, found[step.name])
        return found

    def evidence(self, until: float | None = None) -> Evidence:
        return Evidence(self.run, self.logs / "folder", "cuda", until, lambda: self.clock, self.logs / "fixtures")


def verified(*rows: tuple[str, str, str]) -> str:
    """What `golden verify --json` leaves in its log."""
    listed = [{"case": case, "outcome": outcome, "detail": detail} for case, outcome, detail in rows]
    body = json.dumps(
        {"counts": {"UNRECORDED": len(listed)}, "rows": listed, "record": "records/local/V.parquet"}, indent=2
    )
    return f"capital http_chat tokens: IDENTICAL\n{body}\nsaid at the end\n"


OTHER_NUMERICS = "the answer for cuda-nvidia-h200 has another hard key: numerics_version cuda-4 recorded, cuda-5 here"


def test_rows_are_all_of_bars_but_the_tiny_one_and_each_waits_for_its_file_alone() -> None:
    part = rows_part(FOLDER, "cuda", has_peer=False)

    assert sorted(ROWS) == sorted({*FILES, *MORE} - {"tiny"})
    assert [stage.name for stage in part.stages] == list(ROWS)
    assert part.stages[0].steps[0].command == ("-m", "tests.cuda.bars", "8b-iq4_nl", "in=made", "backend=cuda")
    serving = {one.step.name: one.serves for one in part.needed}
    assert serving["file-8b-q4_k_m"] == {"8b-q4_k_m", "depth", "streams", "long-streams", "prompt", "http"}
    assert serving["file-30b-a3b-q4_k_m"] == {"30b-a3b-q4_k_m"}
    assert serving["kernels-streams"] == {"streams", "long-streams"}
    assert set().union(*serving.values()) == set(ROWS)


def test_a_row_beside_llama_cpp_is_given_longer() -> None:
    took = [
        {stage.name: stage.seconds for stage in rows_part(FOLDER, "cuda", has_peer).stages}
        for has_peer in (True, False)
    ]

    assert [took[0]["8b-q4_k_m"], took[1]["8b-q4_k_m"], took[0]["http"]] == [50, 30, 110]


def test_models_are_checked_side_by_side_and_timed_one_after_another() -> None:
    part = models_part(["a", "b"], "cuda")

    assert [[step.name for step in stage.steps] for stage in part.stages] == [
        ["verify-a", "parity-a", "verify-b", "parity-b"], ["served-a"], ["served-b"],
    ]  # fmt: skip
    assert part.stages[2].steps[0].command == (
        *("-m", "pocketllm", "bench", "-m", "b", "--backend", "cuda", "--scenario", "decode", "--soak", "0s"),
        *("--starts", "1", "--blocks", "7", "--arms", "server:via=http", "--arms", "engine:via=engine"),
    )


def test_kernels_of_every_type_are_compiled_once_by_as_many_processes_as_there_are_cores() -> None:
    part = operations_part(FOLDER, "cuda", ["Q4_0", "Q4_K", "Q6_K", "Q8_0", "F16"], cores=4)

    compiling = [one.step.command for one in part.needed if one.step.name.startswith("kernels-")]
    assert len(compiling) == 4
    assert sorted(word for command in compiling for word in command[4:]) == [
        "F16", "Q4_0", "Q4_K", "Q6_K", "Q8_0", "rest",
    ]  # fmt: skip
    assert "made/135m-q8_0.gguf" in part.stages[0].steps[0].command
    assert [one.step.name for one in operations_part(FOLDER, "cpu", ["Q4_0"], 4).needed] == ["file-135m-q8_0"]
    assert deal(["a"], 0) == [["a"]]


def test_what_is_too_long_is_passed_over_for_what_fits() -> None:
    stages = [Stage("long", 85, ()), Stage("short", 30, ()), Stage("another", 30, ())]

    assert [stage.name for stage in those_that_fit(stages, 84)] == ["short", "another"]
    assert [stage.name for stage in those_that_fit(stages, 115)] == ["long", "short"]


def test_records_are_found_in_lines_and_in_documents() -> None:
    assert records_in("ok\nrecord: records/local/A.parquet\nthe record: no path\n") == ["records/local/A.parquet"]
    assert records_in(verified()) == ["records/local/V.parquet"]
    assert records_in("a line\n{\n  'cut off") == []


def test_a_case_without_any_answer_is_not_one_of_other_numerics() -> None:
    log = verified(
        ("capital", "UNRECORDED", OTHER_NUMERICS),
        ("capital", "UNRECORDED", OTHER_NUMERICS),
        ("count", "IDENTICAL", ""),
        ("sampled", "UNRECORDED", "no answer for cuda-other: sampled.cuda-other.json does not exist"),
    )

    found = unrecorded(log)

    assert found.of_other_numerics == ("capital",)
    assert found.other == ("sampled",)


def test_rows_are_made_in_order_behind_their_files(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    made = machine.evidence()

    made.make(rows_part(FOLDER, "cuda", has_peer=False))

    assert machine.began[1:] == [[row] for row in ROWS]
    assert len(machine.began[0]) == 7
    assert machine.limits[0] is None
    assert [name for name, _ in made.records] == list(ROWS)
    assert made.tell() == 0


def test_nothing_is_begun_that_would_not_end_in_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine(tmp_path)
    made = machine.evidence(until=50 + 30 + 30 + 10)

    made.make(rows_part(FOLDER, "cuda", has_peer=False))

    assert machine.began == [["file-8b-iq4_nl", "file-8b-iq2_xxs"], ["8b-iq4_nl"], ["8b-iq2_xxs"]]
    assert machine.limits == [120, 80, 40]
    assert made.tell() == 3
    assert "LEFT OUT http: it takes about 110 s" in capsys.readouterr().out


def test_time_that_was_not_needed_goes_to_what_seemed_too_long(tmp_path: Path) -> None:
    machine = Machine(tmp_path, factor=0.1)
    made = machine.evidence(until=200)

    made.make(rows_part(FOLDER, "cuda", has_peer=False))

    rows = [names[0] for names in machine.began if names[0] in ROWS]
    assert rows[:3] == list(ROWS[:3])
    assert sorted(rows) == sorted(ROWS)
    files = [name for names in machine.began for name in names if name not in ROWS]
    assert len(files) == len(set(files)) == 7
    assert made.tell() == 0


def test_what_has_its_file_already_needs_no_time_for_it(tmp_path: Path) -> None:
    machine = Machine(tmp_path, factor=0.1)
    made = machine.evidence(until=85)
    file = Preparation(Step("file", (), makes_record=False), frozenset({"short", "long"}))

    made.make(Part("rows", (alone("short", 30, ()), alone("long", 40, ())), (file,), 50))

    assert machine.began == [["file"], ["short"], ["long"]]


def test_what_took_longer_than_expected_leaves_out_what_is_behind_it(tmp_path: Path) -> None:
    machine = Machine(tmp_path, factor=1.5)
    made = machine.evidence(until=120)

    made.make(rows_part(FOLDER, "cuda", has_peer=False))

    assert machine.began[1:] == [["8b-iq4_nl"]]
    assert any(line.startswith("8b-iq2_xxs") for line in made.left_out)


def test_no_file_is_made_where_no_row_would_follow(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    made = machine.evidence(until=79)

    made.make(rows_part(FOLDER, "cuda", has_peer=False))

    assert machine.began == []
    assert len(made.left_out) == len(ROWS)


def test_rows_of_a_file_that_failed_are_left_out_and_the_others_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(tmp_path, {"file-8b-q4_k_m": (1, "begins\nno space left\n")})
    made = machine.evidence()

    made.make(rows_part(FOLDER, "cuda", has_peer=False))

    assert [names[0] for names in machine.began[1:]] == [row for row in ROWS if row not in (*MORE, "8b-q4_k_m")]
    assert made.tell() == 1
    told = capsys.readouterr().out
    assert "file-8b-q4_k_m ended with exit code 1" in told
    assert "ends with: no space left" in told
    assert "FAILED file-8b-q4_k_m" in told
    assert "LEFT OUT http: what it needs could not be made" in told


def proposing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: Sequence[tuple[str, str, str]]) -> Any:
    """Models `a` and `b`, of which `a` has these rows and a proposal in its folder."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "fixtures" / "a"
    folder.mkdir(parents=True)
    (folder / "capital.cuda-gpu.json.pending").write_text('{"provenance": {"record": "01RUN"}}')
    (folder / "count.cuda-gpu.json.pending").write_text('{"provenance": {"record": "01OLD"}}')
    record = tmp_path / "records" / "local" / "01RUN.parquet"
    record.parent.mkdir(parents=True)
    record.write_bytes(b"rows")
    machine = Machine(tmp_path, {"verify-a": (4, verified(*rows))})
    made = machine.evidence()
    made.make(models_part(["a", "b"], "cuda"), ["a", "b"])
    return machine, made


def test_answers_of_other_numerics_are_recorded_anew_and_wait_for_a_person(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine, made = proposing(tmp_path, monkeypatch, [("capital", "UNRECORDED", OTHER_NUMERICS)])

    assert machine.began[1:] == [["record-a"], ["served-a"], ["served-b"]]
    assert record_step("a", "cuda", ["capital"]).command[-2:] == ("--case", "capital")
    assert ("record-a", Path("records/local/01RUN.parquet")) in made.records
    assert (tmp_path / "folder" / "records" / "01RUN.parquet").read_bytes() == b"rows"
    with tarfile.open(tmp_path / "folder" / "pending.tar.gz") as packed:
        assert packed.getnames() == ["fixtures/a/capital.cuda-gpu.json.pending"]
    assert made.tell() == 3
    accepted = 'pocketllm golden accept -m a --backend cuda --case capital --reason "…"'
    told = capsys.readouterr().out
    assert accepted in told
    assert "verify-a ended with exit code 4 after 1 s: records/local/V.parquet; 1 UNRECORDED; see " in told


def test_a_case_without_any_answer_fails_and_is_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, made = proposing(tmp_path, monkeypatch, [("capital", "UNRECORDED", "no answer for cuda-gpu")])

    assert machine.began[1:] == [["served-a"], ["served-b"]]
    assert made.failed == ["verify-a"]
    assert made.tell() == 1


def child(name: str, code: str) -> Step:
    return Step(name, ("-c", code))


def test_children_run_side_by_side_and_their_output_goes_to_a_file_each(tmp_path: Path) -> None:
    told: list[str] = []
    steps = [
        child("slow", "import time; time.sleep(1); print('late')"),
        child("bad", "print('no'); raise SystemExit(3)"),
    ]

    ended = children.together(steps, tmp_path, None, lambda step, how: told.append(step.name))

    assert told == ["bad", "slow"]
    assert (ended["bad"].code, ended["bad"].output()) == (3, "no\n")
    assert (ended["slow"].code, ended["slow"].output()) == (0, "late\n")


def test_a_child_whose_time_is_up_is_ended_with_what_it_started(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys; deaf = 'import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(60)'; "
        "c = subprocess.Popen([sys.executable, '-c', deaf]); "
        "print(c.pid, flush=True); c.wait()"
    )

    ended = children.together([child("endless", code)], tmp_path, 3, lambda step, how: None)

    assert ended["endless"].code is None
    assert ended["endless"].seconds < 20
    pid = int(ended["endless"].output().splitlines()[0])
    until = time.perf_counter() + 5  # who is killed has not gone yet when the signal is sent
    while is_running(pid) and time.perf_counter() < until:
        time.sleep(0.05)
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    """As the kernel tells; one that has ended and that nobody has waited for does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_ctrl_c_ends_children_and_tells_of_them(tmp_path: Path) -> None:
    told: list[tuple[str, int | None]] = []

    def interrupt(step: Step, how: Ended) -> None:
        told.append((step.name, how.code))
        if step.name == "first":
            raise KeyboardInterrupt

    steps = [child("first", ""), child("endless", "import time; time.sleep(60)")]
    with pytest.raises(KeyboardInterrupt):
        children.together(steps, tmp_path, None, interrupt)

    assert told == [("first", 0), ("endless", None)]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["in=made"], "no part is asked for; there are: models, rows, operations"),
        (["rows", "until=soon"], "until=soon is no number of seconds above 0"),
        (["rows", "until=0"], "until=0 is no number"),
        (["rows", "backend=abacus"], "no backend has this name"),
    ],
)
def test_the_driver_refuses_what_it_cannot_do_before_it_makes_anything(
    words: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["evidence", *words])

    with pytest.raises(SystemExit) as ended:
        evidence.main()

    assert ended.value.code == 2
    assert why in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
