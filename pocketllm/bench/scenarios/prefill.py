"""One request at a time, a long prompt and one token out: what reading the prompt costs, at three lengths."""

from pocketllm.bench.scenarios.contract import Point, Scenario

SCENARIO = Scenario(
    name="prefill",
    about="512, 2048 and 8128 tokens in, 1 out, one request at a time",
    point_words="of {} tokens",
    n_prompt=512,
    n_out=1,
    judged=("prefill",),
    # a little less than 8192: the answer's token has to fit into a context of that length too
    points=(Point("512"), Point("2k", n_prompt=2048), Point("8k", n_prompt=8128)),
)
