"""The workflow of this repository runs make targets and nothing else, and what they run, runs here too, in small."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from pocketllm.evidence.store import read_record

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
SETUP = ("setup", "setup-test", "model")
"""Targets that make an environment and fetch a model: the tests have both."""
JOBS = {
    "lint": ["make check"],
    "test": [".ci/run"],
    "golden": ["make golden"],
    "models": ["make models-check"],
    "bench": ["make -C base setup", "make -C new gate BASE=../base"],
}
"""Every command of the workflow, by its job: a command that is added there is added here, with a test that runs it."""


@pytest.fixture(autouse=True)
def _make() -> None:
    if shutil.which("make") is None:
        pytest.skip("make-not-installed")


def make(*words: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run make with the environment of the tests in place of its own."""
    done = [word for target in SETUP for word in ("-o", target)]
    command = ["make", "--no-print-directory", *done, f"BIN={Path(sys.executable).parent}", *words]
    # what was said to the make that these tests run under, such as PYTEST=…, is in the environment too
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("GITHUB_", "MAKE", "MFLAGS")) and name != "PYTEST"
    }
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, env={**clean, **environment})


def commands(target: str) -> list[str]:
    """What a target would run, environment and model apart."""
    answer = make("-n", target)
    assert answer.returncode == 0, answer.stderr
    return [line.replace(f"{Path(sys.executable).parent}/", "") for line in answer.stdout.splitlines()]


def steps(job: str) -> Iterator[dict[str, Any]]:
    yield from WORKFLOW["jobs"][job]["steps"]


# -- the file ----------------------------------------------------------------------------------------------------------
def test_the_workflow_runs_these_commands_and_no_other() -> None:
    found = {job: [step["run"] for step in steps(job) if "run" in step] for job in WORKFLOW["jobs"]}

    assert found == JOBS


def test_every_target_is_one_of_the_makefile_and_told_by_make_help() -> None:
    known = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    targets = {shlex.split(command)[-1 if "=" not in command else -2] for job in JOBS.values() for command in job}
    told = make("help").stdout

    assert targets - {".ci/run"} <= known
    assert [target for target in targets - {".ci/run", "setup"} if f"make {target} " not in told] == []


def test_every_job_has_an_end_and_can_only_read_the_repository() -> None:
    assert all(0 < job["timeout-minutes"] <= 60 for job in WORKFLOW["jobs"].values())
    assert WORKFLOW["permissions"] == {"contents": "read"}


def test_an_event_of_a_stranger_is_text_in_no_shell() -> None:
    scripts = " ".join(step["run"] for job in WORKFLOW["jobs"] for step in steps(job) if "run" in step)

    assert "${{" not in scripts


# -- what its commands run ---------------------------------------------------------------------------------------------
def test_the_test_job_runs_lint_and_every_test_and_allows_no_easy_skip() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    [last] = [line for line in script.splitlines() if line.startswith("exec ")]
    whole, lint = commands("test"), commands("check")

    assert shlex.split(last)[:3] == ["exec", "make", "test"]
    assert "POCKETLLM_NATIVE=require" in script
    assert "--require native-library-missing" in last
    tools = [line.removeprefix("python -m ").split()[0] for line in lint]
    assert tools == ["ruff", "ruff", "mypy", "lint-imports"]
    assert whole[:4] == lint
    assert whole[-1].split() == shlex.split("python -m pytest -n auto --maxprocesses 8 --dist loadfile")


def test_the_pages_pass_as_the_models_job_checks_them() -> None:
    answer = make("models-check")

    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "claim no more than the records prove" in answer.stderr
    assert commands("models-check") == ["pocketllm models check"]


@pytest.mark.model
def test_the_golden_job_s_command_compares_and_would_fail_where_nothing_is(smollm2: Path, tmp_path: Path) -> None:
    few = "--case capital --entry-point in_process"
    answer = make("golden", f"GOLDEN={few} --record-dir {tmp_path}")

    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "IDENTICAL" in answer.stdout
    assert commands("golden") == ["pocketllm golden verify --require "]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Another checkout: this one's package, with a line of its own."""
    leave = shutil.ignore_patterns("__pycache__", "native")
    shutil.copytree(ROOT / "pocketllm", tmp_path / "base" / "pocketllm", ignore=leave)
    with (tmp_path / "base" / "pocketllm" / "errors.py").open("a", encoding="utf-8") as file:
        file.write("# another checkout\n")
    return tmp_path / "base"


def test_the_bench_job_s_command_runs_both_checkouts_and_judges(base: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    words = f"--model {tiny_gguf} --threads 1 --soak 0 --starts 1 --blocks 7 --requests 1 --input-len 24 --output-len 6"
    answer = make("gate", f"BASE={base}", f"OUT={tmp_path}", f"GATE={words}")

    # whether seven short blocks on a busy machine find a difference, or A unlike A, is the machine's to say
    judged = re.search(r"^gate: (\w+): ", answer.stderr, re.MULTILINE)
    assert judged, answer.stdout + answer.stderr
    assert ElementTree.parse(tmp_path / "bench.xml").getroot().find("testcase") is not None
    [path] = tmp_path.glob("*.parquet")
    document = read_record(path).document
    assert [arm["name"] for arm in document["arms"]] == ["base", "new", "null"]
    assert document["arms"][0]["package_sha256"] != document["arms"][1]["package_sha256"]
    [told] = [line for line in commands("gate") if "bench gate" in line]
    assert "--arms base:path=../base --arms new:path=." in told
