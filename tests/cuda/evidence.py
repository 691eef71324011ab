"""Every record that the CUDA backend's claims rest on, what matters most first, on a GPU that one has for a while.

usage: python -m tests.cuda.evidence [models] [rows] [operations] [in=FOLDER] [until=SECONDS] [backend=cuda]

models: goldens, parity and speed of what is in the cache; rows: `tests.cuda.bars`; operations: `op_latency`. They are
made in this order. Nothing is begun that would not end within SECONDS of the start, and nothing is fetched.
FOLDER has the files that are made, logs/, copies of the records in records/, and proposed answers in pending.tar.gz.
Exit: 0 all made · 1 something failed · 2 cannot be done as asked · 3 left out, or proposed and not accepted yet.
"""

import json
import os
import shutil
import signal
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from tests.cuda import children
from tests.cuda.children import Ended, OnEnd
from tests.cuda.evidence_steps import (
    RECORD_S,
    Part,
    Stage,
    Step,
    document,
    models_part,
    operations_part,
    record_step,
    records_in,
    rows_part,
    those_that_fit,
    unrecorded,
    verify_name,
)
from tests.cuda.words import asked, refuse

PARTS = ("models", "rows", "operations")
NOT_COMPARED, INTERRUPTED = 4, 130
"""Exit codes of `golden verify --require` without an answer, and of this driver."""
Run = Callable[[Sequence[Step], float | None, OnEnd], Mapping[str, Ended]]


@dataclass
class Evidence:
    """A run: what there is time for, what came out, what was left out."""

    run: Run
    folder: Path
    backend: str
    until: float | None
    now: Callable[[], float]
    """Seconds since the start."""
    fixtures: Path
    records: list[tuple[str, Path]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    proposed: list[str] = field(default_factory=list)
    """Commands with which a person accepts."""

    def left_s(self) -> float:
        return float("inf") if self.until is None else self.until - self.now()

    def say(self, line: str) -> None:
        print(f"{self.now():5.0f} s  {line}", flush=True)

    def make(self, part: Part, models: Sequence[str] = ()) -> None:
        """A part, as far as there is time; what was quicker than expected leaves time for what seemed too long."""
        waiting, made = list(part.stages), dict[str, bool]()
        while fitting := self.fitting(part, waiting, made):
            waiting = [stage for stage in waiting if stage not in fitting]
            self.prepare(part, fitting, made)
            for stage in fitting:
                if stage.seconds > self.left_s():
                    self.leave_out(stage.name, f"it takes about {stage.seconds:.0f} s")
                elif not all(made[one.step.name] for one in part.needed if stage.name in one.serves):
                    self.leave_out(stage.name, "what it needs could not be made")
                else:
                    self.judge(self.stage(stage), models if stage.name == "checks" else ())
        for stage in waiting:
            self.leave_out(stage.name, f"it takes about {stage.seconds:.0f} s")

    def fitting(self, part: Part, waiting: Sequence[Stage], made: Mapping[str, bool]) -> list[Stage]:
        """What there is time for behind what it needs; else what has that already."""
        unmade = [one.serves for one in part.needed if one.step.name not in made]
        ready = [stage for stage in waiting if not any(stage.name in serves for serves in unmade)]
        return those_that_fit(waiting, self.left_s() - part.needed_s) or those_that_fit(ready, self.left_s())

    def prepare(self, part: Part, fitting: Sequence[Stage], made: dict[str, bool]) -> None:
        """Make what these stages need and is not made yet, and nothing else."""
        names = {stage.name for stage in fitting}
        steps = tuple(one.step for one in part.needed if one.serves & names and one.step.name not in made)
        if steps:
            ended = self.stage(Stage(f"{part.name}: files and kernels", part.needed_s, steps))
            for name, how in ended.items():
                made[name] = how.is_well
                self.count(name, how)

    def leave_out(self, name: str, why: str) -> None:
        self.left_out.append(f"{name}: {why}")
        self.say(f"{name} is left out: {why}")

    def stage(self, stage: Stage) -> Mapping[str, Ended]:
        """Begin it, wait, and say how each child ended."""
        side_by_side = f", {len(stage.steps)} side by side" if len(stage.steps) > 1 else ""
        self.say(f"{stage.name} begins{side_by_side}: about {stage.seconds:.0f} s")
        return self.run(stage.steps, None if self.until is None else self.left_s(), self.ended)

    def ended(self, step: Step, how: Ended) -> None:
        """Keep the records of a child that has ended, and say what it did."""
        paths = [Path(path) for path in records_in(how.output())] if step.makes_record else []
        for path in paths:
            self.keep(step.name, path)
        if how.code is None:
            self.left_out.append(f"{step.name}: it was ended before it was done")
        where = ", ".join(map(str, paths)) or ("no record" if step.makes_record and how.is_well else "")
        self.say(f"{step.name} {words_of(how)} after {how.seconds:.0f} s{': ' * bool(where)}{where}{advice(how)}")

    def count(self, name: str, how: Ended) -> None:
        if how.code:
            self.failed.append(name)

    def keep(self, name: str, path: Path) -> None:
        """A copy beside the logs, so that one folder has everything that goes home."""
        self.records.append((name, path))
        target = self.folder / "records" / path.name
        if path.is_file() and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)

    def judge(self, ended: Mapping[str, Ended], models: Sequence[str]) -> None:
        """Count failures; ask again, for a person to accept, what only numerics have left without an answer."""
        anew = {}
        for model in models:
            how = ended[verify_name(model)]
            answers = unrecorded(how.output())
            if answers.of_other_numerics:
                anew[model] = answers.of_other_numerics
                self.say(f"{model}: {len(answers.of_other_numerics)} answers are of other numerics")
            if answers.other:
                self.say(f"{model}: no answer to compare {', '.join(answers.other)} with")
        for name, how in ended.items():
            can_be_accepted = any(name == verify_name(model) for model in anew) and how.code == NOT_COMPARED
            if not can_be_accepted or unrecorded(how.output()).other:
                self.count(name, how)
        if anew:
            self.propose(anew)

    def propose(self, anew: Mapping[str, Sequence[str]]) -> None:
        """Record these cases, and pack what is proposed."""
        steps = tuple(record_step(model, self.backend, cases) for model, cases in anew.items())
        stage = Stage("golden record", RECORD_S, steps)
        if stage.seconds > self.left_s():
            for step in steps:
                self.leave_out(step.name, f"it takes about {stage.seconds:.0f} s")
            return
        ended = self.stage(stage)
        for step, (model, cases) in zip(steps, anew.items(), strict=True):
            self.count(step.name, ended[step.name])
            files = pending_files(self.fixtures / model, cases)
            for record in sorted({backing(file) for file in files} - {None}, key=str):
                for path in sorted(Path("records").rglob(f"{record}.parquet")):
                    self.keep(step.name, path)
            if files:
                self.proposed += acceptance(model, self.backend, cases)
        proposals = [file for model, cases in anew.items() for file in pending_files(self.fixtures / model, cases)]
        pack(self.folder / "pending.tar.gz", proposals)

    def tell(self) -> int:
        """A line a record, what failed, what was left out, what a person has to do; the exit code."""
        print(f"\n{len(self.records)} records after {self.now():.0f} s, copied to {self.folder / 'records'}:")
        for name, path in self.records:
            print(f"  {name}: {path}")
        for name in self.failed:
            print(f"FAILED {name}: {self.folder / 'logs' / name}.txt")
        for line in self.left_out:
            print(f"LEFT OUT {line}")
        if self.proposed:
            archive = self.folder / "pending.tar.gz"
            print(
                "PROPOSED, not accepted. Read the answers, accept what is right with this code and such a GPU, here or"
            )
            print(f"where {archive} was unpacked in the checkout, and verify again:")
        for command in self.proposed:
            print(f"  {command}")
        sys.stdout.flush()
        return 1 if self.failed else 3 if self.left_out or self.proposed else 0


def words_of(how: Ended) -> str:
    if how.code is None:
        return "was ended before it was done,"
    return "ended well" if how.is_well else f"ended with exit code {how.code}"


def advice(how: Ended) -> str:
    """What a verification counted; of a child that did not end well its log, and the last line there."""
    output = how.output()
    counts = document(output).get("counts", {})
    told = "".join(f"; {count} {word}" for word, count in counts.items())
    if how.is_well:
        return told
    last = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "nothing")
    return f"{told}; see {how.log}" + (f", which ends with: {last[:200]}" if not counts else "")


def pending_files(folder: Path, cases: Sequence[str]) -> list[Path]:
    return sorted(file for case in cases for file in folder.glob(f"{case}.*json.pending"))


def backing(file: Path) -> str | None:
    """The id of the run record that a proposed answer names."""
    found: Any = json.loads(file.read_text(encoding="utf-8")).get("provenance", {}).get("record")
    return None if found is None else str(found)


def pack(archive: Path, files: Sequence[Path]) -> None:
    """Proposals under the names that they have from here; no archive without any."""
    if files:
        with tarfile.open(archive, "w:gz") as packed:
            for file in files:
                packed.add(file, os.path.relpath(file))


def acceptance(model: str, backend: str, cases: Sequence[str]) -> list[str]:
    """Commands with which a person reads proposals and accepts them."""
    key, named = f"-m {model} --backend {backend}", " ".join(f"--case {case}" for case in cases)
    return [f"pocketllm golden review {key}", f'pocketllm golden accept {key} {named} --reason "…"']


def parts_of(names: Sequence[str], models: Sequence[str], folder: Path, backend: str) -> list[Part]:
    """What is asked for, what matters most first."""
    from pocketllm.engine.backends.cuda.layouts import BYTES_PER_ELEMENT

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    make = {
        "models": partial(models_part, models, backend),
        "rows": partial(rows_part, folder, backend, shutil.which("llama-server") is not None),
        "operations": partial(operations_part, folder, backend, sorted(BYTES_PER_ELEMENT), cores),
    }
    return [make[name]() for name in PARTS if name in names]


def seconds(text: str | None) -> float | None:
    """What `until=` says."""
    try:
        found = None if text is None else float(text)
    except ValueError:
        found = 0.0
    if found is not None and not 0 < found < float("inf"):
        refuse(__doc__, f"until={text} is no number of seconds above 0")
    return found


def require(backend: str) -> None:
    """End the process with 2 where the backend cannot run, before half a minute of files."""
    from pocketllm.engine.backends.select import offers
    from pocketllm.errors import PocketLLMError

    try:
        offers(backend)
    except PocketLLMError as error:
        refuse(__doc__, str(error))


def on_terminate(number: int, frame: object) -> NoReturn:
    """A limit on this process ends its children too, and what was done is said."""
    raise KeyboardInterrupt


def main() -> int:
    words = asked(__doc__, [*PARTS, "in", "until", "backend"])
    said = dict(word.split("=", 1) for word in words if "=" in word)
    names = [word for word in words if "=" not in word]
    if not names:
        refuse(__doc__, f"no part is asked for; there are: {', '.join(PARTS)}")
    folder, backend, until = Path(said.get("in", ".")), said.get("backend", "cuda"), seconds(said.get("until"))
    require(backend)
    from pocketllm.engine.weights.catalog import CATALOG, cache_dir, list_cached
    from pocketllm.golden.files.folder import default_root

    folder.mkdir(parents=True, exist_ok=True)
    start, models = time.perf_counter(), [model.name for model in list_cached()]
    run = partial(together, folder / "logs")
    evidence = Evidence(run, folder, backend, until, lambda: time.perf_counter() - start, default_root())
    signal.signal(signal.SIGTERM, on_terminate)
    try:
        if "models" in names:
            for name in CATALOG.keys() - models:
                evidence.leave_out(name, f"it is not in {cache_dir()}: pocketllm models pull {name}")
        for part in parts_of(names, models, folder, backend):
            evidence.make(part, models)
    except KeyboardInterrupt:
        evidence.say("interrupted; what was running has been ended")
        evidence.tell()
        return INTERRUPTED
    return evidence.tell()


def together(logs: Path, steps: Sequence[Step], limit_s: float | None, on_end: OnEnd) -> Mapping[str, Ended]:
    return children.together(steps, logs, limit_s, on_end)


if __name__ == "__main__":
    sys.exit(main())
