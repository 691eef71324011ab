"""One request at a time, a long prompt and one token out: what reading the prompt costs."""

from pocketllm.bench.scenarios.contract import Scenario

SCENARIO = Scenario(
    name="prefill",
    about="512 tokens in (--input-len changes it), 1 out, one request at a time",
    n_prompt=512,
    n_out=1,
    judged=("prefill",),
)
