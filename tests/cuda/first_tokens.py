"""A file of `tests.cuda.bars`, made where it is not there yet, and its first tokens: they compile what its rows run.

usage: python -m tests.cuda.first_tokens FILE … [in=FOLDER] [backend=cuda]   (FILE: a name of `bars.FILES`)
"""

import sys
import time
from pathlib import Path

from tests.cuda.bars import FILES, file_of
from tests.cuda.words import asked, refuse

TEXT = Path(__file__).parents[1] / "parity" / "alice.txt"
PROMPT_WORDS, TOKENS = (16, 500), 24
KV_CACHE_BYTES = 4 << 30
"""Several such processes share a GPU; each by itself would take a quarter of it."""


def main() -> int:
    words = asked(__doc__, [*FILES, "in", "backend"])
    said = dict(word.split("=", 1) for word in words if "=" in word)
    names = [word for word in words if "=" not in word]
    if not names:
        refuse(__doc__, "no file is named")
    folder = Path(said.get("in", "."))
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        answer(file_of(name, folder), said.get("backend", "cuda"))
    return 0


def answer(path: Path, backend: str) -> None:
    from pocketllm import LLM, SamplingParams

    start, text = time.perf_counter(), TEXT.read_text(encoding="utf-8").split()
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    with LLM(model=str(path), backend=backend, kv_cache_bytes=KV_CACHE_BYTES) as llm:
        for count in PROMPT_WORDS:
            llm.generate(" ".join(text[:count]), greedy)
    print(f"{path}: its first tokens in {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
