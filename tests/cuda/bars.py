"""The rows of docs/performance.md on a GPU: files of real shapes, and a benchmark of each with a record.

usage: python -m tests.cuda.bars ROW … [in=FOLDER] [backend=cuda]   (rows below, or `all`; files are kept in FOLDER)

A llama-server on the PATH takes turns with ours where one request is in flight. A row takes half a minute to a minute.
"""

import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.cuda.file import write
from tests.cuda.words import asked, refuse

FILES: dict[str, tuple[str, str]] = {
    "8b-q4_k_m": ("8b", "Q4_K_M"), "8b-q8_0": ("8b", "Q8_0"), "8b-iq4_nl": ("8b", "IQ4_NL"),
    "8b-iq2_xxs": ("8b", "IQ2_XXS"), "30b-a3b-q4_k_m": ("30b-a3b", "Q4_K_M"), "135m-q8_0": ("135m", "Q8_0"),
    "tiny": ("tiny", "Q4_K_M"),
}  # fmt: skip
"""Shape and types of `tests.cuda.file`."""
DECODE = ("--scenario", "decode", "--input-len", "32", "--output-len", "128", "--requests", "1")
PEER = "llama.cpp:recipe=llama-server,args=-ngl 99 -fa on -c 8192"
BASE = ("--arms", "base")
MORE: dict[str, Sequence[str]] = {
    "depth": ("--scenario", "context", "--points", "0,4k", "--requests", "1", *BASE),
    "streams": (
        *("--scenario", "concurrency", "--points", "8,32", "--input-len", "32", "--output-len", "128"),
        *("--requests", "32", *BASE),
    ),
    "long-streams": (
        *("--scenario", "concurrency", "--points", "8,32", "--input-len", "1024", "--output-len", "128"),
        *("--requests", "32", *BASE),
    ),
    "prompt": ("--scenario", "prefill", "--points", "512", *BASE),
    "http": (
        *("--scenario", "decode", "--input-len", "512", "--requests", "1"),
        *("--arms", "server:via=http", "--arms", "engine:via=engine"),
    ),
}
"""What else is asked of 8B Q4_K_M; time to the first token over HTTP is 512 times that run's prefill."""


def checkpoint_of(row: str) -> str:
    """The name in FILES of what a row asks."""
    return row if row in FILES else "8b-q4_k_m"


def path_of(name: str, folder: Path) -> Path:
    return folder / f"{name}.gguf"


def file_of(row: str, folder: Path) -> Path:
    """A row's checkpoint, made where it is not there yet."""
    name = checkpoint_of(row)
    path = path_of(name, folder)
    if not path.exists():
        start, part = time.perf_counter(), path.with_suffix(".part")
        write(part, *FILES[name])
        part.rename(path)
        print(f"{path}: {path.stat().st_size / 2**30:.2f} GiB in {time.perf_counter() - start:.0f} s", flush=True)
    return path


def arms_of(row: str) -> Sequence[str]:
    if row in MORE:
        return MORE[row]
    return (*DECODE, *(("--arms", PEER, "--arms", "ours:via=engine") if shutil.which("llama-server") else BASE))


def main() -> int:
    known = [*FILES, *MORE, "all", "in", "backend"]
    words = asked(__doc__, known)
    said = dict(word.split("=", 1) for word in words if "=" in word)
    rows = [word for word in words if "=" not in word]
    rows = [row for row in (*FILES, *MORE) if row != "tiny"] if "all" in rows else rows
    if not rows:
        refuse(__doc__, "no row is asked for")
    folder = Path(said.get("in", "."))
    folder.mkdir(parents=True, exist_ok=True)
    # some seconds of heat: a GPU's clock rises meanwhile, and the null arm would tell
    fixed = ("--backend", said.get("backend", "cuda"), "--soak", "3s", "--starts", "1", "--blocks", "7")
    ended = 0
    for row in rows:
        command = ["bench", "--model", str(file_of(row, folder)), *fixed, *arms_of(row)]
        print(f"{row}: pocketllm {' '.join(command)}", flush=True)
        ended |= subprocess.run([sys.executable, "-m", "pocketllm", *command], check=False).returncode
    return ended


if __name__ == "__main__":
    sys.exit(main())
