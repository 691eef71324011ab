"""Requests of many lengths that arrive when they like: what share of them is served in time."""

from pocketllm.bench.scenarios.contract import Arrivals, Point, Scenario

SCENARIO = Scenario(
    name="mixed",
    about="Poisson arrivals, 2 a second, 128 to 384 tokens in and 32 to 96 out; in time: TTFT 2 s, TPOT 200 ms",
    n_prompt=256,
    n_out=64,
    judged=("ttft", "tpot"),
    shown=("e2el", "goodput", "throughput"),
    burnin=0.5,
    points=(Point(arrivals=Arrivals.POISSON, rate_per_s=2.0, spread=0.5, num_requests=12),),
    slos={"ttft": 2.0, "tpot": 0.2},
)
