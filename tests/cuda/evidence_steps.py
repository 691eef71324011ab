"""What `tests.cuda.evidence` makes: command lines, their order, the seconds they are expected to take, what fits.

Nothing here starts a process or looks at a clock.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cuda.bars import FILES, MORE, checkpoint_of, path_of

ROWS = (
    *("8b-iq4_nl", "8b-iq2_xxs", "30b-a3b-q4_k_m", "http", "depth", "8b-q4_k_m", "8b-q8_0", "streams", "prompt"),
    "long-streams",
    "135m-q8_0",
)
"""Of `tests.cuda.bars`, what claims rest on most first."""
ROW_S = {"http": 110, "streams": 70, "long-streams": 90, "30b-a3b-q4_k_m": 50}
"""Seconds of a row, as an H200 took them in a host of sixteen cores; ANY_ROW_S for the others."""
ANY_ROW_S, PEER_ROW_S = 30, 50
"""PEER_ROW_S: of 8B Q4_K_M where a llama-server takes turns with it."""
READY_S, CHECKS_S, RECORD_S, SERVED_S, COMPILE_S, TIMES_S = 50, 90, 60, 60, 50, 60
OPERATIONS_MODEL = "135m-q8_0"
STREAMS_SHAPE = ("shape=1,4096,14336,32,8,128,128256", "types=Q4_K,Q6_K,Q6_K", "cases=1@0,8@32,32@32,1@4096")
"""One layer of the 8B shape in the widths that `streams` has steps of: its kernels are compiled without its file."""


@dataclass(frozen=True)
class Step:
    """A child; command: what stands behind the interpreter. It has a record when `makes_record`."""

    name: str
    command: tuple[str, ...]
    makes_record: bool = True


@dataclass(frozen=True)
class Stage:
    """Children side by side, and how many seconds they take together."""

    name: str
    seconds: float
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Preparation:
    """A child that makes files or compiles kernels, and the stages that are only begun after it."""

    step: Step
    serves: frozenset[str]


@dataclass(frozen=True)
class Part:
    """Stages one after another, behind what they need, which is made side by side."""

    name: str
    stages: tuple[Stage, ...]
    needed: tuple[Preparation, ...] = ()
    needed_s: float = 0


@dataclass(frozen=True)
class Answers:
    """What `golden verify --json` said of cases without an answer."""

    of_other_numerics: tuple[str, ...]
    other: tuple[str, ...]


def pocketllm(*words: str) -> tuple[str, ...]:
    return ("-m", "pocketllm", *words)


def models_part(models: Sequence[str], backend: str) -> Part:
    """Goldens and parity of all of them side by side; then, each alone, how fast it is over HTTP and in process."""
    checks = [
        step
        for model in models
        for step in (
            Step(verify_name(model), pocketllm("golden", "verify", "-m", model, "--backend", backend, "--require",
                                               "--json")),
            Step(f"parity-{model}", ("-m", "tests.parity.record", model, "--backend", backend)),
        )
    ]  # fmt: skip
    fixed = ("--scenario", "decode", "--soak", "0s", "--starts", "1", "--blocks", "7")
    arms = ("--arms", "server:via=http", "--arms", "engine:via=engine")
    served = [
        alone(f"served-{model}", SERVED_S, pocketllm("bench", "-m", model, "--backend", backend, *fixed, *arms))
        for model in models
    ]
    return Part("models", (Stage("checks", CHECKS_S, tuple(checks)), *served) if models else ())


def verify_name(model: str) -> str:
    return f"verify-{model}"


def record_step(model: str, backend: str, cases: Sequence[str]) -> Step:
    """Ask cases anew; the run record is named by the proposals that it backs."""
    named = [word for case in cases for word in ("--case", case)]
    command = pocketllm("golden", "record", "-m", model, "--backend", backend, *named)
    return Step(f"record-{model}", command, makes_record=False)


def rows_part(folder: Path, backend: str, has_peer: bool) -> Part:
    """Rows of `tests.cuda.bars`, each alone, behind their files and kernels."""
    where = (f"in={folder}", f"backend={backend}")
    stages = tuple(alone(row, row_seconds(row, has_peer), ("-m", "tests.cuda.bars", row, *where)) for row in ROWS)
    needed = [first_tokens(name, where, [row for row in ROWS if checkpoint_of(row) == name]) for name in row_files()]
    if backend == "cuda":
        command = ("-m", "tests.cuda.model", "rates", "prefill", *STREAMS_SHAPE)
        needed.append(
            Preparation(Step("kernels-streams", command, makes_record=False), frozenset({"streams", "long-streams"}))
        )
    return Part("rows", stages, tuple(needed), READY_S)


def row_files() -> list[str]:
    """Names of `bars.FILES` that the rows ask for, in their order."""
    return list(dict.fromkeys(checkpoint_of(row) for row in ROWS))


def row_seconds(row: str, has_peer: bool) -> float:
    assert row in FILES or row in MORE, row
    return PEER_ROW_S if row == "8b-q4_k_m" and has_peer else ROW_S.get(row, ANY_ROW_S)


def first_tokens(name: str, where: Sequence[str], serves: Sequence[str]) -> Preparation:
    """A file, and as soon as it is there the kernels that its first tokens compile."""
    step = Step(f"file-{name}", ("-m", "tests.cuda.first_tokens", name, *where), makes_record=False)
    return Preparation(step, frozenset(serves))


def operations_part(folder: Path, backend: str, quant_types: Sequence[str], cores: int) -> Part:
    """Every operation timed, behind kernels that as many processes compile as there are cores."""
    file = str(path_of(OPERATIONS_MODEL, folder))
    fixed = ("--scenario", "op_latency", "--blocks", "7", "--arms", "base", "--soak", "0s")
    times = alone("op_latency", TIMES_S, pocketllm("bench", *fixed, "--model", file, "--backend", backend))
    serves = [times.name]
    needed = [first_tokens(OPERATIONS_MODEL, (f"in={folder}", f"backend={backend}"), serves)]
    if backend == "cuda":
        groups = {"rest": ["rest"], **{f"{at}": dealt for at, dealt in enumerate(deal(quant_types, cores - 1), 1)}}
        for name, types in groups.items():
            command = ("-m", "tests.cuda.operations", "135m", "Q8_0", *types)
            needed.append(Preparation(Step(f"kernels-{name}", command, makes_record=False), frozenset(serves)))
    return Part("operations", (times,), tuple(needed), COMPILE_S)


def deal(names: Sequence[str], hands: int) -> list[list[str]]:
    """Names in turn to so many hands, at least one, none of them empty.

    >>> deal(["a", "b", "c"], 2)
    [['a', 'c'], ['b']]
    """
    hands = max(1, min(hands, len(names)))
    return [list(names[at::hands]) for at in range(hands)] if names else []


def alone(name: str, seconds: float, command: tuple[str, ...]) -> Stage:
    return Stage(name, seconds, (Step(name, command),))


def those_that_fit(stages: Sequence[Stage], seconds: float) -> list[Stage]:
    """The first that there is time for, and behind one that is too long the shorter ones.

    >>> [stage.name for stage in those_that_fit([Stage("a", 50, ()), Stage("b", 40, ()), Stage("c", 10, ())], 60)]
    ['a', 'c']
    """
    taken = []
    for stage in stages:
        if stage.seconds <= seconds:
            taken.append(stage)
            seconds -= stage.seconds
    return taken


def document(log: str) -> Mapping[str, Any]:
    """What a command with --json printed among its lines of progress; nothing where it ended before."""
    found = re.search(r"^\{$", log, re.MULTILINE)
    if found is None:
        return {}
    try:
        value: Mapping[str, Any] = json.JSONDecoder().raw_decode(log[found.start() :])[0]
    except json.JSONDecodeError:  # it was ended while it printed
        return {}
    return value


def records_in(log: str) -> list[str]:
    """Paths of the records that a child says it wrote."""
    told = re.findall(r"^record: (\S.*)$", log, re.MULTILINE)
    inside = document(log).get("record")
    return list(dict.fromkeys([*told, *([inside] if inside else [])]))


def unrecorded(log: str) -> Answers:
    """Cases that `golden verify --json` had nothing to compare with: under other numerics there is an answer."""
    rows = [row for row in document(log).get("rows", ()) if row["outcome"] == "UNRECORDED"]
    of_other = [row["case"] for row in rows if "numerics_version" in row["detail"]]
    return Answers(
        tuple(dict.fromkeys(of_other)), tuple(dict.fromkeys(row["case"] for row in rows if row["case"] not in of_other))
    )
