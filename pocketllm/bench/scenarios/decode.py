"""One request at a time, 128 tokens in and 128 out: what a token costs once the prompt is read."""

from pocketllm.bench.scenarios.contract import Scenario

SCENARIO = Scenario(
    name="decode",
    about="128 tokens in, 128 out, one request at a time",
    n_prompt=128,
    n_out=128,
    judged=("decode",),
    shown=("prefill", "first_decode"),
    burnin=0.25,
)
