"""Steps in flight on a GPU: draws against the host's, the same answers with a step in flight and without, repeats,
rates in process and over HTTP, host time.

usage: python -m tests.cuda.overlap PATH [served]   (exit 1 when an answer differs; PATH: see tests.cuda.file)
"""

import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from pocketllm import LLM, SamplingParams
from pocketllm.engine.backends.cuda.steps.drawing.drawer import Pending
from tests.cuda import draws
from tests.cuda.engine import served_rate
from tests.cuda.words import refuse

REPEATS, TOKENS = 20, 48
PROMPTS = ([5, 6, 7], list(range(40, 140)), [9] * 30, [300, 301, 302, 303], [17], [8, 9] * 20, [77] * 5, [250, 3])
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "seed": 2},
    {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 1.0, "typical_p": 0.9, "seed": 3},
    {"temperature": 0.0, "allowed_token_ids": tuple(range(100, 400))},
    {"temperature": 0.7, "seed": 4, "stop_token_ids": tuple(range(0, 40000, 50))},
)
"""One of them is drawn by the host."""


def main() -> int:
    if len(sys.argv) < 2:
        refuse(__doc__, "PATH is missing: a checkpoint to drive")
    path = sys.argv[1]
    draws.check_on_gpu()
    with LLM(model=path, max_num_seqs=8, prefix_cache=False) as llm:
        other = LLM.from_engine(llm.engine.sibling(overlap=False))
        assert [one.engine.plan.limits.max_steps_in_flight for one in (llm, other)] == [2, 1]
        problems = compared(llm, other) + repeated(llm)
        own = rates({"overlapped": llm, "one at a time": other})
        other.close()
    if "served" in sys.argv:
        served = served_rate(path)
        print(f"over HTTP {served:.0f} tok/s, {served / own:.3f} of in process")
    for problem in problems:
        print("FAIL", problem)
    return 1 if problems else 0


def answers(llm: LLM, kinds: Sequence[dict[str, Any]], together: bool) -> list[Any]:
    """Ids and log-probabilities, of all prompts at once or one after another."""
    params = [SamplingParams(max_tokens=TOKENS, **{"ignore_eos": True, **kind}) for kind in kinds]
    prompts = list(PROMPTS[: len(kinds)])
    results = (
        llm.generate(prompts, params)
        if together
        else [llm.generate([prompt], [one])[0] for prompt, one in zip(prompts, params, strict=True)]
    )
    return [(result.token_ids, result.finish_reason, result.logprobs) for result in results]


def compared(llm: LLM, other: LLM) -> list[str]:
    """Each kind of request alone: the same to the last bit; and all at once, where only their steps differ."""
    problems = []
    one, two = answers(llm, KINDS, False), answers(other, KINDS, False)
    for kind, got, want in zip(KINDS, one, two, strict=True):
        if got != want:
            problems.append(f"{kind} differs with a step in flight")
    greedy = [{"temperature": 0.0}] * len(PROMPTS)
    if answers(llm, greedy, True) != answers(other, greedy, True):
        problems.append("eight greedy requests at once differ with a step in flight")
    mixed = sum(a == b for a, b in zip(answers(llm, KINDS, True), answers(other, KINDS, True), strict=True))
    print(f"alone: {len(KINDS) - len(problems)} of {len(KINDS)} kinds equal; of eight at once {mixed}")
    return problems


def repeated(llm: LLM) -> list[str]:
    """The same greedy and the same seeded request again and again."""
    found = [{str(answers(llm, [kind], False)) for _ in range(REPEATS)} for kind in KINDS[:3]]
    print(f"{REPEATS} repeats: {[len(some) for some in found]} different answers")
    return [f"{kind} has {len(some)} answers" for kind, some in zip(KINDS, found, strict=False) if len(some) > 1]


def rates(arms: dict[str, LLM]) -> float:
    """Tokens a second after the first, arms in turn; the time that the host spends in a step without waiting."""
    took: dict[str, list[float]] = {name: [] for name in arms}
    busy: dict[str, list[float]] = {name: [] for name in arms}
    waited = [0.0]
    wait = Pending.wait

    def timed(pending: Pending) -> Any:
        start = time.perf_counter()
        if pending.arrived is not None:
            pending.arrived.synchronize()
        waited[0] += time.perf_counter() - start
        return wait(pending)

    Pending.wait = timed  # type: ignore[method-assign]  # for the time of this measurement
    greedy = SamplingParams(temperature=0, max_tokens=256, ignore_eos=True)
    for turn in range(7):
        for name, llm in arms.items():
            waited[0], start = 0.0, time.perf_counter()
            [result] = llm.generate([PROMPTS[0]], greedy)
            whole = time.perf_counter() - start
            if turn > 1:
                took[name].append(result.timings.decode_s / 255)
                busy[name].append((whole - waited[0]) / 256)
    Pending.wait = wait  # type: ignore[method-assign]  # as it was
    for name in arms:
        step, host = statistics.median(took[name]), statistics.median(busy[name])
        print(f"{name}: {1 / step:.0f} tok/s, step {step * 1e6:.0f} us, of it the host's {host * 1e6:.0f} us")
    return 1 / statistics.median(took["overlapped"])


if __name__ == "__main__":
    sys.exit(main())
