"""Sixteen prompts that arrive at once: how long the last one waits, and how soon all are done."""

from pocketllm.bench.scenarios.contract import Arrivals, Point, Scenario

SCENARIO = Scenario(
    name="wave",
    about="16 prompts of 325 tokens arriving at once, 64 out",
    n_prompt=325,
    n_out=64,
    judged=("ttft", "throughput"),
    shown=("tpot", "e2el"),
    burnin=0.25,
    points=(Point(arrivals=Arrivals.WAVE, num_requests=16),),
)
