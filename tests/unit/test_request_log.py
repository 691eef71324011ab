"""What is said of a call once it is over."""

from types import SimpleNamespace
from typing import Any, cast

from pocketllm.engine.lifecycle.request import Request
from pocketllm.engine.lifecycle.sampling.params import SamplingParams
from pocketllm.engine.serving.transport.request_log import summarized


def test_a_call_that_was_given_up_is_told_of_with_the_tokens_that_it_had() -> None:
    request = Request("r-0", [1, 2, 3], SamplingParams(), output_token_ids=[4, 5], num_cached_tokens=1)
    given_up = SimpleNamespace(requests=(request,), ends=[], request_id="r", id="r", is_streamed=True)
    summary = summarized(cast(Any, given_up), "/v1/completions")

    assert (summary.prompt_tokens, summary.cached_tokens, summary.completion_tokens) == (3, 1, 2)
    assert summary.finish_reasons == ("cancelled",)
