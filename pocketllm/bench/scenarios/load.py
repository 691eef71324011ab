"""How long a new process takes to its first token: with the weights in the page cache, and without."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pocketllm.bench.latency import Timed
from pocketllm.bench.probes import page_cache
from pocketllm.bench.scenarios.contract import Need, Point, Scenario
from pocketllm.bench.scenarios.prompts import prompt_text
from pocketllm.bench.targets.contract import Ask, Sample

if TYPE_CHECKING:
    from pocketllm.engine.load import Engine

PROMPT_WORDS = 24
TIMEOUT_S = 600.0


class StartMeter:
    """Starts `pocketllm generate` anew for each sample, with the options of the arm's engine."""

    def __init__(self, engine: "Engine") -> None:
        self.options = engine.options.as_dict()
        self.files = engine.checkpoint.files
        self._copies: tempfile.TemporaryDirectory[str] | None = None

    @property
    def facts(self) -> Mapping[str, Any]:
        return {
            "command": "pocketllm generate PROMPT --max-tokens 1",
            "weights_bytes": sum(path.stat().st_size for path in self.files),
        }

    def __call__(self, point: Point, salt: str) -> Sequence[tuple[Ask, Sample]]:
        """One start. Cold: the weights are dropped from the page cache just before; MachineError when they stay."""
        ask = Ask(f"start-{salt}", (), prompt_text(salt, PROMPT_WORDS), 1)
        if point.label == "cold":
            files = self.copies()
            for path in files:
                page_cache.drop(path)
        else:
            files = self.files
            for path in files:
                page_cache.read_through(path)
        return [(ask, first_token(ask, {**self.options, "model": str(files[0])}))]

    def copies(self) -> tuple[Path, ...]:
        """The weights in files that no process maps: what is mapped cannot be dropped."""
        if self._copies is None:
            page_cache.require_droppable()
            self._copies = tempfile.TemporaryDirectory(prefix="pocketllm-load-")
            for path in self.files:
                shutil.copyfile(path, Path(self._copies.name) / path.name)
        return tuple(Path(self._copies.name) / path.name for path in self.files)


def first_token(ask: Ask, options: Mapping[str, Any]) -> Sample:
    """Start a process with these engine options and wait for the first byte it prints: the first token's text."""
    command = [sys.executable, "-m", "pocketllm", "generate", ask.prompt_text, "--max-tokens", "1", "--ignore-eos"]
    given = {f"POCKETLLM_{name.upper()}": str(value) for name, value in options.items() if value is not None}
    start = time.perf_counter_ns()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, env={**os.environ, **given}
        )
        sample = Sample(start, start, start)
        try:
            assert process.stdout is not None
            printed = process.stdout.read(1)
            stamp = time.perf_counter_ns()
            process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
            process.wait()
        if process.returncode != 0 or not printed:
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines()
            sample.error = f"pocketllm generate ended with {process.returncode}: {lines[-1] if lines else 'no reason'}"
            return sample
    sample.t_first_ns, sample.chunk_t_ns, sample.chunk_ntok = stamp, [stamp], [1]
    sample.n_out, sample.finish = 1, "length"
    return sample


def start_costs(requests: Sequence[Timed], slos: Mapping[str, float]) -> dict[str, float]:
    """Seconds from process start to first token: the mean over a slot's starts."""
    seconds = [(one.chunk_t_ns[0] - one.t_send_ns) / 1e9 for one in requests if one.chunk_t_ns]
    return {"start": sum(seconds) / len(seconds)} if seconds else {}


def meters(targets: Mapping[str, Any]) -> dict[str, StartMeter]:
    """One meter an arm."""
    return {name: StartMeter(target.engine) for name, target in targets.items()}


SCENARIO = Scenario(
    name="load",
    about="process start to first token, weights in the page cache (warm) and dropped from it (cold)",
    point_words="from a {} page cache",
    n_prompt=PROMPT_WORDS,
    n_out=1,
    judged=("start",),
    points=(Point("warm"), Point("cold")),
    needs=frozenset({Need.ENGINE}),
    meters=meters,
    costs=start_costs,
)
