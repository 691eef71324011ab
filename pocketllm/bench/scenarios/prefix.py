"""A system prompt that all requests share: its cost when nobody has read it yet, and when a cache holds it."""

from pocketllm.bench.scenarios.contract import Point, Scenario

SHARED = 1024

SCENARIO = Scenario(
    name="prefix",
    about="1024 shared tokens and 64 of one's own in, 16 out; cold: a new system prompt each time, hit: the same one",
    point_words="with the prefix {}",
    n_prompt=SHARED + 64,
    n_out=16,
    judged=("ttft",),
    shown=("tpot",),
    points=(Point("cold", n_prefix=SHARED), Point("hit", n_prefix=SHARED, warm_prefix=True)),
)
