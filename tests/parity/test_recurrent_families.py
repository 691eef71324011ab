"""Recurrent families and gpt-oss over the reference backend: other shapes than the fixtures', and the usual mistakes.

That they agree in all ways of feeding a prompt is tested with the other families, in test_families.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pocketllm import LLM, SamplingParams
from pocketllm.engine.backends.api.mixture import Gating
from pocketllm.engine.backends.api.ops import Norm
from pocketllm.engine.models.rope import inverse_frequencies
from tests.parity.drive import Driver, chunks, nmse
from tests.parity.recurrent_oracle import SPECS
from tests.parity.test_expert_families import bias_weighs
from tests.parity.test_families import Mistaken, norm_plus_one, other_layout, with_routing, without_bias
from tests.parity.tiny_families import TinyFamily, decoded, weights, write_family

ORACLES = Path(__file__).parents[1] / "oracles"
TOLERANCE = 1e-9
HYBRIDS = ("qwen3_5_text", "qwen3_next", "lfm2")


@pytest.mark.parametrize("name", SPECS)
def test_other_heads_taps_and_layers_agree_with_transformers(name: str, tmp_path: Path) -> None:
    expected = np.load(ORACLES / f"{name}.npz")
    path = write_family(tmp_path / "tiny.gguf", SPECS[name])
    [got] = Driver(path).run([expected["input_ids"].tolist()], chunks(40, 17))

    assert nmse(got, expected["logits"]) <= TOLERANCE


@pytest.mark.parametrize("quant_type", ["Q8_0", "MXFP4"])
@pytest.mark.parametrize(
    "architecture",
    ["qwen35", "qwen35moe", "qwen3next", "gpt-oss", "lfm2", "lfm2moe", "gemma4", "qwen4exp", "deepseek4", "glm5-next"],
)
def test_packed_matrices_whole_or_in_rows_compute_what_they_stand_for(
    architecture: str, quant_type: str, tmp_path: Path
) -> None:
    spec = TinyFamily(architecture, 61, {"expert_feed_forward_length": 64}, quant_type=quant_type)
    twin = replace(spec, quant_type="F32", tensors=decoded(spec))
    ids = np.random.RandomState(7).randint(0, 512, 20).tolist()
    [packed], [plain] = (
        Driver(write_family(tmp_path / name, one)).run([ids], chunks(20, 20))
        for name, one in (("packed", spec), ("plain", twin))
    )

    assert decoded(spec)
    assert np.array_equal(packed, plain)


@pytest.mark.parametrize(
    ("architecture", "keys"),
    [
        ("qwen35moe", {}),
        ("qwen3next", {}),
        ("deepseek2", {"attention.head_count": 1}),
        ("qwen3moe", {"expert_count": 1}),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_a_file_that_leaves_out_leading_ones_of_its_shapes_is_the_same_model(
    architecture: str, keys: dict[str, int], tmp_path: Path
) -> None:
    """As llama.cpp's tools write them: a shared expert's gate is a row there, not a matrix of one."""
    spec = TinyFamily(architecture, 63, keys | ({"expert_used_count": 1} if "expert_count" in keys else {}))
    short = {name: values.reshape([n for n in values.shape if n > 1]) for name, values in weights(spec).items()}
    shorter = {name: values for name, values in short.items() if values.ndim < weights(spec)[name].ndim}
    ids = list(range(30, 42))
    [whole], [cut] = (
        Driver(write_family(tmp_path / name, one)).run([ids], chunks(12, 12))
        for name, one in (("whole", spec), ("cut", replace(spec, tensors=shorter)))
    )

    assert shorter
    assert np.array_equal(whole, cut)


# -- mistakes: what each of them changes is outside the tolerance ----------------------------------------------------
Op = Callable[..., Any]


def with_net(**changes: Any) -> Op:
    return lambda right, mixed, step, share, net, *rest: right(mixed, step, share, replace(net, **changes), *rest)


def steps_and_shares_exchanged(right: Op, mixed: Any, step: Any, share: Any, *rest: Any) -> Any:
    return right(mixed, share, step, *rest)


def no_time_bias(right: Op, mixed: Any, step: Any, share: Any, net: Any, *rest: Any) -> Any:
    return right(mixed, step - net.time_bias, share, net, *rest)


def nothing_forgotten(right: Op, mixed: Any, step: Any, share: Any, net: Any, *rest: Any) -> Any:
    return right(mixed, step - 1e4, share, net, *rest)


def rate_without_exp(right: Op, mixed: Any, step: Any, share: Any, net: Any, *rest: Any) -> Any:
    return right(mixed, step, share, replace(net, rate=-(-net.rate).log()), *rest)


def with_silu(wanted: bool) -> Op:
    return lambda right, x, kernel, states, layer, batch, silu: right(x, kernel, states, layer, batch, wanted)


def kernel_backwards(right: Op, x: Any, kernel: Any, *rest: Any, silu: bool) -> Any:
    return right(x, kernel.flip(1), *rest, silu)


def not_gated(right: Op, gate: Any, x: Any) -> Any:
    return x


def rows_not_gated(right: Op, gate: Any, x: Any) -> Any:
    return right(gate, x) if gate.shape[1] == 1 else x


def shared_expert_not_gated(right: Op, gate: Any, x: Any) -> Any:
    return x if gate.shape[1] == 1 else right(gate, x)


def sigmoid_for_silu(right: Op, gate: Any, x: Any) -> Any:
    return gate.sigmoid() * x


def head_norms_stored_with_one(right: Op, x: Any, norm: Norm) -> Any:
    """As if the norm within a DeltaNet head had its 1 added too."""
    is_inner = len(norm.weight) == 16 and x.shape[-1] == 64
    return right(x, Norm(norm.weight - 1, norm.eps)) if is_inner else right(x, norm)


def rows_of_queries_and_gates_halved(right: Op, x: Any, angles: Any, head_dim: int, layout: Any) -> Any:
    """The queries that come of taking `attn_q` for [queries | gates] and not head by head."""
    return (
        right(x.roll(head_dim, -1), angles, head_dim, layout)
        if x.shape[-1] > 2 * head_dim
        else right(x, angles, head_dim, layout)
    )


def no_sinks(right: Op, q: Any, sinks: Any, *rest: Any) -> Any:
    return right(q, sinks - 1e4, *rest)


def sinks_scaled(right: Op, q: Any, sinks: Any, cache: Any, layer: int, batch: Any, spec: Any) -> Any:
    return right(q, sinks * spec.scale, cache, layer, batch, spec)


def seen(**changes: Any) -> Op:
    return lambda right, q, sinks, cache, layer, batch, spec: right(
        q, sinks, cache, layer, batch, replace(spec, **changes)
    )


def local_where_global(right: Op, q: Any, sinks: Any, cache: Any, layer: int, batch: Any, spec: Any) -> Any:
    return right(q, sinks, cache, layer, batch, replace(spec, window=None if spec.window else 8))


def experts(**changes: Any) -> Op:
    return lambda right, x, bounded: right(x, replace(bounded, **changes))


def no_expert_biases(right: Op, x: Any, bounded: Any) -> Any:
    return right(x, replace(bounded, gate_bias=bounded.gate_bias * 0))


def without_one(right: Op, x: Any, bounded: Any) -> Any:
    return right(x, replace(bounded, up_bias=bounded.up_bias - 1))


def weights_over_all(right: Op, x: Any, bounded: Any) -> Any:
    routing = replace(bounded.experts.routing, normalized=False)
    return right(x, replace(bounded, experts=replace(bounded.experts, routing=routing)))


def mul_of(first: bool) -> Op:
    """A gate left out: the first `mul` of a layer is before its convolution, the second after it."""
    calls = iter(range(1 << 30))
    return lambda right, gate, x: x if (next(calls) % 2 == 0) is first else right(gate, x)


MISTAKES: Sequence[tuple[str, str, dict[str, Op]]] = [
    ("qwen3_5_text", "neighbors rotate", {"rope": other_layout}),
    ("qwen3_5_text", "value heads grouped", {"gated_delta": with_net(is_tiled=False)}),
    ("qwen3_5_text", "steps and shares exchanged", {"gated_delta": steps_and_shares_exchanged}),
    ("qwen3_5_text", "no time bias", {"gated_delta": no_time_bias}),
    ("qwen3_5_text", "nothing forgotten", {"gated_delta": nothing_forgotten}),
    ("qwen3_5_text", "rate taken for its logarithm", {"gated_delta": rate_without_exp}),
    ("qwen3_5_text", "no silu after the convolution", {"causal_conv": with_silu(False)}),
    ("qwen3_5_text", "kernel backwards", {"causal_conv": kernel_backwards}),
    ("qwen3_5_text", "attention not gated", {"sigmoid_mul": not_gated}),
    ("qwen3_5_text", "sigmoid for silu", {"silu_mul": sigmoid_for_silu}),
    ("qwen3_5_text", "one added to norms again", {"rms_norm": norm_plus_one}),
    ("qwen3_5_text", "one in the norms of heads", {"rms_norm": head_norms_stored_with_one}),
    ("qwen3_5_text", "queries beside gates", {"rope": rows_of_queries_and_gates_halved}),
    ("qwen3_next", "value heads tiled", {"gated_delta": with_net(is_tiled=True)}),
    ("qwen3_next", "steps and shares exchanged", {"gated_delta": steps_and_shares_exchanged}),
    ("qwen3_next", "one added to norms again", {"rms_norm": norm_plus_one}),
    ("qwen3_next", "one in the norms of heads", {"rms_norm": head_norms_stored_with_one}),
    ("qwen3_next", "weights not normalized", {"mixture": with_routing(normalized=False)}),
    ("qwen3_next", "shared expert not gated", {"sigmoid_mul": shared_expert_not_gated}),
    ("qwen3_next", "attention not gated", {"sigmoid_mul": rows_not_gated}),
    ("gpt_oss", "neighbors rotate", {"rope": other_layout}),
    ("gpt_oss", "no biases", {"project": without_bias}),
    ("gpt_oss", "no sinks", {"sink_attention": no_sinks}),
    ("gpt_oss", "sinks scaled like scores", {"sink_attention": sinks_scaled}),
    ("gpt_oss", "all layers global", {"sink_attention": seen(window=None)}),
    ("gpt_oss", "all layers local", {"sink_attention": seen(window=8)}),
    ("gpt_oss", "local layers are the others", {"sink_attention": local_where_global}),
    ("gpt_oss", "experts without biases", {"bounded_mixture": no_expert_biases}),
    ("gpt_oss", "silu of the gate", {"bounded_mixture": experts(slope=1.0)}),
    ("gpt_oss", "no one beside the value", {"bounded_mixture": without_one}),
    ("gpt_oss", "a tighter bound", {"bounded_mixture": experts(limit=0.5)}),
    ("gpt_oss", "weights over all experts", {"bounded_mixture": weights_over_all}),
    ("lfm2", "neighbors rotate", {"rope": other_layout}),
    ("lfm2", "silu after the convolution", {"causal_conv": with_silu(True)}),
    ("lfm2", "kernel backwards", {"causal_conv": kernel_backwards}),
    ("lfm2", "no gate before", {"mul": mul_of(first=True)}),
    ("lfm2", "no gate after", {"mul": mul_of(first=False)}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "mistake", "replacements"), MISTAKES, ids=[f"{n}: {m}" for n, m, _ in MISTAKES])
def test_a_mistake_in_one_operation_is_seen(name: str, mistake: str, replacements: dict[str, Op]) -> None:
    expected = np.load(ORACLES / f"{name}.npz")
    driver = Driver(ORACLES / f"{name}.gguf")
    driver.model = replace(driver.model, ops=Mistaken(driver.ops, replacements))
    [got] = driver.run([expected["input_ids"].tolist()], chunks(48, 48))

    assert nmse(got, expected["logits"]) > 10 * TOLERANCE


OF_MADE: Sequence[tuple[str, str, dict[str, Op]]] = [
    ("qwen35moe", "shared expert not gated", {"sigmoid_mul": shared_expert_not_gated}),
    ("qwen35moe", "value heads grouped", {"gated_delta": with_net(is_tiled=False)}),
    ("qwen35moe", "weights not normalized", {"mixture": with_routing(normalized=False)}),
    ("lfm2moe", "softmax for sigmoid", {"mixture": with_routing(gating=Gating.SOFTMAX)}),
    ("lfm2moe", "bias left out", {"mixture": with_routing(bias=None)}),
    ("lfm2moe", "bias weighs", {"mixture": bias_weighs}),
    ("lfm2moe", "weights not normalized", {"mixture": with_routing(normalized=False)}),
]


@pytest.mark.parametrize(("name", "mistake", "replacements"), OF_MADE, ids=[f"{n}: {m}" for n, m, _ in OF_MADE])
def test_a_mistake_with_experts_is_seen(name: str, mistake: str, replacements: dict[str, Op], tmp_path: Path) -> None:
    expected = np.load(ORACLES / f"{name}.npz")
    driver = Driver(write_family(tmp_path / "tiny.gguf", SPECS[name]))
    driver.model = replace(driver.model, ops=Mistaken(driver.ops, replacements))
    [got] = driver.run([expected["input_ids"].tolist()], chunks(40, 40))

    assert nmse(got, expected["logits"]) > 10 * TOLERANCE


def test_a_ramp_rounded_to_whole_pairs_is_seen_in_gpt_oss() -> None:
    expected = np.load(ORACLES / "gpt_oss.npz")
    driver = Driver(ORACLES / "gpt_oss.gguf")
    from pocketllm.engine.models.families import gpt_oss
    from pocketllm.engine.models.header import HeaderReader

    rope = gpt_oss.read_shape(HeaderReader(driver.checkpoint.metadata, "gpt-oss")).dense.rope
    rounded = driver.ops.load_vector(inverse_frequencies(replace(rope, rounds_ramp=True)))
    driver.model = replace(driver.model, inv_freq=rounded)
    [got] = driver.run([expected["input_ids"].tolist()], chunks(48, 48))

    assert nmse(got, expected["logits"]) > 10 * TOLERANCE


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_state_that_an_earlier_sequence_left_in_a_slot_is_not_read(name: str) -> None:
    expected = np.load(ORACLES / f"{name}.npz")
    driver = Driver(ORACLES / f"{name}.gguf")
    for states in driver.states:
        for kept in (*states.conv, *states.delta):
            kept.fill_(np.nan)
    [got] = driver.run([expected["input_ids"].tolist()], chunks(48, 5))

    assert nmse(got, expected["logits"]) <= TOLERANCE


# -- through the whole engine ----------------------------------------------------------------------------------------
OPTIONS: dict[str, Any] = {"backend": "reference", "threads": 1, "max_model_len": 128}


@pytest.mark.parametrize("name", HYBRIDS)
def test_eight_requests_together_get_the_tokens_that_each_gets_alone(name: str) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    prompts = [[number, *range(30, 30 + 5 * number)] for number in range(1, 9)]
    with LLM(str(ORACLES / f"{name}.gguf"), prefix_cache=False, max_num_seqs=1, **OPTIONS) as llm:
        alone = [llm.generate([prompt], params)[0].token_ids for prompt in prompts]
    # room for about half of them, so that some are preempted and begin again
    size = 24 * 16 * llm.engine.plan.kv_bytes_per_token // 2
    with LLM(str(ORACLES / f"{name}.gguf"), kv_cache_bytes=size, reserve=0.0, **OPTIONS) as llm:
        together = [answer.token_ids for answer in llm.generate(prompts, params)]
        num_preemptions = llm.engine.loop.stats().num_preemptions

    assert together == alone
    assert num_preemptions > 0


@pytest.mark.parametrize("name", [*HYBRIDS, "qwen4_exp_text"])
def test_a_prompt_repeated_whole_computes_nothing_and_changes_no_token_and_no_logprob(name: str) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=2)
    prompt = list(range(20, 57))
    with LLM(str(ORACLES / f"{name}.gguf"), **OPTIONS) as llm:
        [cold] = llm.generate([prompt], params)
        before = llm.engine.loop.stats().num_step_tokens
        [warm] = llm.generate([prompt], params)
        num_computed = llm.engine.loop.stats().num_step_tokens - before

    assert warm.usage.cached_tokens == 37
    assert num_computed == 11  # tokens of the answer, the last of which is drawn and never computed
    assert (warm.token_ids, warm.logprobs) == (cold.token_ids, cold.logprobs)


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_conversation_that_goes_on_from_a_snapshot_changes_no_token(name: str) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    prompt = list(range(20, 57))
    with LLM(str(ORACLES / f"{name}.gguf"), prefix_cache=False, **OPTIONS) as llm:
        [first] = llm.generate([prompt], params)
        turn = [*prompt, *first.token_ids, 7, 8, 9]
        [cold] = llm.generate([turn], params)
    with LLM(str(ORACLES / f"{name}.gguf"), **OPTIONS) as llm:
        [again] = llm.generate([prompt], params)
        [warm] = llm.generate([turn], params)

    assert again.token_ids == first.token_ids
    assert warm.usage.cached_tokens == 48  # of 37 + 19 computed ones, whole blocks
    assert warm.token_ids == cold.token_ids
