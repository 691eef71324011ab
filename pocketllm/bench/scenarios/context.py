"""Decode at depth: what a token costs when so many are in the context before it."""

from pocketllm.bench.scenarios.contract import Point, Scenario

SHORT = 32
"""Prompt tokens at depth 0, and on top of each depth."""

SCENARIO = Scenario(
    name="context",
    about="32 tokens out after 0, 4k, 16k and 32k tokens of context (and 32 more), one request at a time",
    point_words="at depth {}",
    n_prompt=SHORT,
    n_out=32,
    judged=("decode",),
    shown=("prefill",),
    burnin=0.25,
    points=tuple(Point(f"{depth}k" if depth else "0", n_prompt=depth * 1024 + SHORT) for depth in (0, 4, 16, 32)),
)
