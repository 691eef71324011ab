"""The whole engine on a GPU with a real checkpoint: repeats, batches against single requests, and HTTP's share.

usage: python -m tests.cuda.engine [MODEL]   (exit 1 when an answer differs where the oracle's lead is no tie)
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import httpx

from pocketllm import LLM, SamplingParams

PROMPTS = (
    "The capital of France is", "Once upon a time there was", "To bake a cake you need", "The three primary colors are",
    "In 1969 men first", "Photosynthesis is the process by which", "The largest ocean on Earth is", "A prime number is",
)  # fmt: skip
REPEATS, TOKENS, TIE = 20, 48, 0.1
"""TIE: a lead in nats below which another row order of sums may turn the likeliest token over."""
PORT = 18123


def main() -> int:
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
    with LLM(model=model, max_num_seqs=8) as llm:
        problems = repeated(llm) + batched(llm)
        own = rate(llm)
    served = served_rate(model)
    print(f"decode at c = 1: {own:.0f} tok/s in process, {served:.0f} over HTTP, ratio {served / own:.3f}")
    for problem in problems:
        print("FAIL", problem)
    return 1 if problems else 0


def repeated(llm: LLM) -> list[str]:
    """The same request again and again."""
    greedy, problems = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True), []
    for prompt in PROMPTS[:3]:
        answers = {tuple(llm.generate(prompt, greedy)[0].token_ids) for _ in range(REPEATS)}
        print(f"{REPEATS} repeats of {prompt!r}: {len(answers)} different")
        if len(answers) > 1:
            problems.append(f"{prompt!r} has {len(answers)} answers")
    return problems


def batched(llm: LLM) -> list[str]:
    """Eight requests at once against each by itself."""
    greedy, problems = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=2), []
    alone = [llm.generate(prompt, greedy)[0] for prompt in PROMPTS]
    equal = 0
    for prompt, one, other in zip(PROMPTS, alone, llm.generate(list(PROMPTS), greedy), strict=True):
        at = first_difference(one.token_ids, other.token_ids)
        equal += at is None
        if at is not None:
            top = one.logprobs[at].top_logprobs
            lead = float(top[0] - top[1])
            print(f"c = 8 differs from c = 1 at token {at} of {prompt!r}, where the lead is {lead:.4f} nat")
            if lead > TIE:
                problems.append(f"{prompt!r} differs at token {at} with a lead of {lead:.4f} nat")
    print(f"c = 8 equal to c = 1: {equal} of {len(PROMPTS)}, {TOKENS} tokens each")
    return problems


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)


def rate(llm: LLM) -> float:
    """Tokens a second after the first, in process."""
    greedy = SamplingParams(temperature=0, max_tokens=256, ignore_eos=True)
    results = [llm.generate(PROMPTS[1], greedy)[0].timings for _ in range(5)]
    return 255 / statistics.median(timings.decode_s for timings in results)


def served_rate(model: str) -> float:
    """The same over HTTP, streamed."""
    words = [sys.executable, "-m", "pocketllm", "serve", "--model", model, "--port", str(PORT)]
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=60) as client:
            wait_until_ready(client)
            return statistics.median([stream_rate(client) for _ in range(6)][1:])
    finally:
        server.terminate()
        server.wait(30)


def wait_until_ready(client: httpx.Client) -> None:
    for _ in range(600):
        try:
            if client.get("/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise TimeoutError("the server was not ready within a minute")


def stream_rate(client: httpx.Client) -> float:
    body: dict[str, Any] = {"prompt": PROMPTS[1], "max_tokens": 256, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "model": client.get("/v1/models").json()["data"][0]["id"]}
    with client.stream("POST", "/v1/completions", json=body) as reply:
        events = ((line, time.perf_counter()) for line in reply.iter_lines() if line.startswith("data: {"))
        stamps = [stamp for line, stamp in events if json.loads(line[6:]).get("choices")]
    return 255 / (stamps[-1] - stamps[0])


if __name__ == "__main__":
    sys.exit(main())
