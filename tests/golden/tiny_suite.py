"""The suite that every served model carries, for a tiny random checkpoint of each family.

    python -m tests.golden.tiny_suite [--out FOLDER] [ARCHITECTURE …]

records it again, on every backend that runs the family, after a change of numerics or of the family's tiny checkpoint.
From a clean tree; what changed is then looked at and committed like any golden.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pocketllm.engine.load import Engine, load_engine
from pocketllm.engine.models.registry import known_architectures
from pocketllm.engine.options import EngineOptions
from pocketllm.errors import PocketLLMError, UnsupportedFeatureError
from pocketllm.golden.files.folder import FixtureFolder
from pocketllm.golden.recording.accept import accept
from pocketllm.golden.recording.record import record, request
from pocketllm.golden.subject import subject_of
from tests.parity.tiny_families import TinyFamily, write_family
from tests.tiny import TinyLlama, write_llama

FIXTURES = Path(__file__).parent / "fixtures"
BACKENDS = ("cpu", "reference")
REASON = "the tiny checkpoint's own answers, held to an outside oracle by tests/parity"
GREEDY = {"temperature": 0.0, "ignore_eos": True}
IDS = "in_process"


def cases(stop: str) -> dict[str, dict[str, Any]]:
    """The suite: what each case is there to catch stands in its purpose."""
    long = " ".join(f"{number} 日本 🙂 once upon a time" for number in range(16))
    turns = [
        {"role": "user", "content": "hello there, who are you and what do you do all day?"},
        {"role": "assistant", "content": "a tiny model"},
        {"role": "user", "content": "and now?"},
    ]
    return {
        "long-prompt": {
            "purpose": "many cache blocks, two prefill chunks, CJK, emoji; cold, warm, streamed and two at once agree",
            "prompt": long,
            "sampling": {"max_tokens": 8, **GREEDY},
            "paths": [IDS, f"{IDS}:warm", "http_completions", "http_completions:stream", "http_completions:stream@2"],
        },
        "steps": {
            "purpose": "more than 64 decode steps, ended by the limit",
            "prompt": "once upon",
            "sampling": {"max_tokens": 66, **GREEDY},
            "paths": [IDS, "http_completions:stream@2"],
        },
        "stop-string": {
            "purpose": "a stop string that spans tokens is left out, whole",
            "prompt": "once upon",
            "sampling": {"max_tokens": 40, "stop": [stop], **GREEDY},
            "paths": [IDS, "http_completions:stream"],
        },
        "second-turn": {
            "purpose": "a second turn that finds the first in the prefix cache",
            "messages": turns,
            "sampling": {"max_tokens": 6, **GREEDY},
            "paths": [IDS, f"{IDS}:warm", "http_chat:warm", "http_chat:stream@2"],
        },
        "sampled": {
            "purpose": "a draw from a seed, alone or beside others",
            "prompt": "once upon",
            "sampling": {"max_tokens": 6, "temperature": 0.9, "seed": 11, "ignore_eos": True},
            "paths": [IDS, "http_completions@2"],
        },
    }


def checkpoint(architecture: str, folder: Path) -> Path:
    """A family's tiny checkpoint, written in milliseconds; its file has the family's name."""
    path = folder / f"tiny-{architecture}.gguf"
    return (
        write_llama(path, TinyLlama(seed=1))
        if architecture == "llama"
        else write_family(path, TinyFamily(architecture, seed=1))
    )


def opened(path: Path, backend: str) -> Engine:
    """The checkpoint on a backend; UnsupportedFeatureError where that cannot run it."""
    return load_engine(EngineOptions(model=str(path), backend=backend, threads=1))


def stop_of(engine: Engine, path: Path) -> str:
    """A stop string for this checkpoint's own words."""
    from tests.golden.workshop import stop_string

    return stop_string(engine, "once upon", 40)


def record_family(architecture: str, out: Path) -> Iterator[str]:
    """Record and accept the suite of one family on each backend; a line about each."""
    with tempfile.TemporaryDirectory() as work:
        # outside the checkout, so that what is recorded first does not make the tree dirty for the next
        root, path, stop = Path(work) / "fixtures", checkpoint(architecture, Path(work)), None
        for backend in BACKENDS:
            try:
                engine = opened(path, backend)
            except UnsupportedFeatureError as error:
                yield f"{architecture} on {backend}: {error}"
                continue
            with engine:
                stop = stop or stop_of(engine, path)
                yield f"{architecture} on {backend}: smallest margin {record_on(engine, root, cases(stop)):.2g} nat"
        for folder in root.iterdir() if root.is_dir() else ():
            shutil.rmtree(out / folder.name, ignore_errors=True)
            shutil.copytree(folder, out / folder.name)


def record_on(engine: Engine, root: Path, tables: Mapping[str, Mapping[str, Any]]) -> float:
    """Record and accept on one engine; returns the smallest margin of a greedy case."""
    subject = subject_of(engine)
    folder = FixtureFolder(root / subject.name)
    # random weights have no clear answers: what a tie may turn over is told by the outcome
    asked = [request(name, {**table, "tags": ["tie-probe"]}, "tiny_suite") for name, table in tables.items()]
    command = ["python", "-m", "tests.golden.tiny_suite", *sys.argv[1:]]
    proposals = record(subject, folder, asked, command, record_dir=root.parent / "records")
    accept(subject, folder, [proposal.case.name for proposal in proposals], REASON, is_ci=False)
    return min(proposal.answer.smallest_margin for proposal in proposals if proposal.case.is_greedy)


def main() -> None:
    """Record the families that are named, else all that there are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", metavar="ARCHITECTURE")
    parser.add_argument("--out", type=Path, default=FIXTURES)
    given = parser.parse_args()
    for architecture in given.architectures or known_architectures():
        for line in record_family(architecture, given.out):
            print(line, flush=True)


if __name__ == "__main__":
    try:
        main()
    except PocketLLMError as error:
        sys.exit(f"error: {error}")
