"""A ladder of concurrency: so many requests in flight all the time, a new one as soon as one ends."""

from pocketllm.bench.scenarios.contract import Point, Scenario

LEVELS = (1, 2, 4, 8, 16, 32)

SCENARIO = Scenario(
    name="concurrency",
    about="325 tokens in, 64 out, 1, 2, 4, 8, 16 and 32 requests in flight",
    point_words="with {} in flight",
    n_prompt=325,
    n_out=64,
    judged=("throughput",),
    shown=("ttft", "tpot"),
    burnin=0.25,
    # two rounds and more, so that the ends of a level, where fewer are in flight, do not carry it
    points=tuple(Point(str(level), concurrency=level, num_requests=max(2, 2 * level)) for level in LEVELS),
)
