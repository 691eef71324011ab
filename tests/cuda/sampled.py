"""How many tokens a second a checkpoint gives, by what is asked of its draws: through `LLM`, as its users ask.

usage: python -m tests.cuda.sampled FILE
"""

import sys
import time
from typing import Any

from tests.cuda.words import refuse

KINDS: dict[str, dict[str, Any]] = {
    "the likeliest": {"temperature": 0},
    "temperature": {"temperature": 0.8, "seed": 1},
    "temperature, top-k 50, top-p 0.95": {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "seed": 1},
    "temperature, repetition penalty": {"temperature": 0.8, "repetition_penalty": 1.1, "seed": 1},
}
PROMPT, TOKENS, TURNS = "word1 word2 word3", 200, 3
KV_CACHE_BYTES = 4 << 30


def main() -> None:
    if len(sys.argv) != 2:
        refuse(__doc__, "one file is needed")
    from pocketllm import LLM, SamplingParams

    with LLM(model=sys.argv[1], backend="cuda", kv_cache_bytes=KV_CACHE_BYTES) as llm:
        for streams in (1, 8):
            for name, kind in KINDS.items():
                params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, **kind)
                took = []
                for _ in range(TURNS):  # the first compiles and captures
                    start = time.perf_counter()
                    llm.generate([PROMPT] * streams, params)
                    took.append(time.perf_counter() - start)
                rate = streams * TOKENS / min(took)
                print(
                    f"{streams} streams, {name}: {rate:.0f} tok/s, {min(took) / TOKENS * 1e3:.2f} ms a step", flush=True
                )


if __name__ == "__main__":
    main()
