"""glm5-next over the reference backend: held to transformers in all ways of feeding a prompt, and usual mistakes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pocketllm import LLM, SamplingParams
from pocketllm.engine.backends.api.mixture import Gating
from pocketllm.engine.backends.api.ops import Norm
from tests.parity.drive import Driver, Step, chunks, nmse
from tests.parity.glm5_next_oracle import ORACLES, SPECS
from tests.parity.test_deepseek4 import bias_weighs
from tests.parity.test_families import Mistaken, norm_plus_one
from tests.parity.tiny_families import write_family

TOLERANCE = 1e-9
LENGTHS = [72, 31, 17, 5, 1]
Op = Callable[..., Any]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    return {name: write_family(folder / f"{name}.gguf", spec) for name, spec in SPECS.items()}


def expected(name: str) -> tuple[list[int], np.ndarray]:
    """The tokens of a committed oracle, and its logits."""
    found = np.load(ORACLES / f"{name}.npz")
    return found["input_ids"].tolist(), found["logits"]


@pytest.mark.parametrize("name", SPECS)
def test_logits_agree_with_transformers_and_a_prompt_in_pieces_gives_the_bits_of_one_batch(
    name: str, files: dict[str, Path]
) -> None:
    (ids, logits), driver = expected(name), Driver(files[name])
    [whole] = driver.run([ids], chunks(72, 72))
    driver.reset()
    [sevens] = driver.run([ids], chunks(72, 7))
    driver.reset()
    [singles] = driver.run([ids], [[(0, 9)], *([[(0, 1)]] * 18)])

    assert nmse(whole, logits) <= TOLERANCE
    assert np.array_equal(sevens, whole)
    assert np.array_equal(singles, whole[:27])


@pytest.mark.parametrize("name", ["glm5_next", "glm5_next_tight_limits"])
def test_five_sequences_together_have_the_bits_of_each_alone(name: str, files: dict[str, Path]) -> None:
    (ids, _), driver = expected(name), Driver(files[name])
    [whole] = driver.run([ids], chunks(72, 72))
    driver.reset()
    first: Step = [(sequence, -(-length // 2)) for sequence, length in enumerate(LENGTHS)]
    rest: Step = [(sequence, length // 2) for sequence, length in reversed(list(enumerate(LENGTHS))) if length > 1]
    together = driver.run([ids[:length] for length in LENGTHS], [first, rest])

    for part, length in zip(together, LENGTHS, strict=True):
        assert np.array_equal(part, whole[:length])


@pytest.mark.parametrize("block_size", [5, 6, 16])
def test_a_sequence_that_continues_on_another_s_blocks_and_state_gives_its_bits(
    block_size: int, files: dict[str, Path]
) -> None:
    """A block may end within a pool: the state holds what the pool's tokens gave."""
    (ids, _), driver = expected("glm5_next"), Driver(files["glm5_next"], block_size=block_size)
    [whole] = driver.run([ids], chunks(72, 72))
    driver.reset()
    driver.run([ids], [[(0, 2 * block_size)]])
    driver.follow(0, 1)
    [_, warm] = driver.run([ids, ids], [[(1, 16)]])

    assert np.array_equal(warm, whole[2 * block_size : 2 * block_size + 16])


def test_nothing_of_what_a_slot_held_before_is_read(files: dict[str, Path]) -> None:
    (ids, logits), driver = expected("glm5_next"), Driver(files["glm5_next"])
    for states in driver.states:
        for kept in (*states.conv, *states.delta):
            kept.fill_(np.nan)
    [got] = driver.run([ids], chunks(30, 5))

    assert nmse(got, logits[:30]) <= TOLERANCE


def test_a_prefix_cache_hit_and_a_prompt_repeated_whole_change_no_token_and_no_logprob(files: dict[str, Path]) -> None:
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=2)
    prompt, options = list(range(20, 57)), {"backend": "reference", "threads": 1, "max_model_len": 128}
    with LLM(str(files["glm5_next"]), prefix_cache=False, **options) as llm:
        [cold] = llm.generate([prompt], params)
    with LLM(str(files["glm5_next"]), **options) as llm:
        llm.generate([[*prompt[:34], 7, 8, 9]], params)
        warm, again = (llm.generate([prompt], params)[0] for _ in range(2))

    assert (warm.usage.cached_tokens, again.usage.cached_tokens) == (32, 37)
    for other in (warm, again):
        assert (other.token_ids, other.logprobs) == (cold.token_ids, cold.logprobs)


@pytest.mark.parametrize("ones", [(64, 4), (64, 1, 4)], ids=["matrix", "three sizes"])
def test_a_kernel_with_fewer_sizes_of_one_is_the_same_kernel(
    ones: tuple[int, ...], tmp_path: Path, files: dict[str, Path]
) -> None:
    spec = SPECS["glm5_next"]
    own = Driver(files["glm5_next"]).checkpoint
    kernels = {name: own.values(name).reshape(ones) for name in own.tensors if "ssm_conv1d" in name}
    path = write_family(tmp_path / "x.gguf", replace(spec, tensors={**spec.tensors, **kernels}))
    (ids, logits), driver = expected("glm5_next"), Driver(path)

    assert nmse(driver.run([ids], [[(0, 24)]])[0], logits[:24]) <= TOLERANCE


# -- mistakes: what each of them changes is outside the tolerance ----------------------------------------------------
def with_net(**changes: Any) -> Op:
    def wrong(right: Op, q: Any, k: Any, v: Any, step: Any, share: Any, net: Any, *rest: Any) -> Any:
        return right(q, k, v, step, share, replace(net, **changes), *rest)

    return wrong


def one_decay_a_head(right: Op, q: Any, k: Any, v: Any, step: Any, share: Any, net: Any, *rest: Any) -> Any:
    """As Gated DeltaNet has it: the mean over a head's values for each of them."""
    mean = (step + net.time_bias).view(len(step), net.num_heads, -1).mean(-1, keepdim=True)
    return right(q, k, v, mean.expand(-1, -1, net.dim).flatten(1) - net.time_bias, share, net, *rest)


def no_time_bias(right: Op, q: Any, k: Any, v: Any, step: Any, share: Any, net: Any, *rest: Any) -> Any:
    return right(q, k, v, step - net.time_bias, share, net, *rest)


def rate_taken_for_its_logarithm(right: Op, q: Any, k: Any, v: Any, step: Any, share: Any, net: Any, *rest: Any) -> Any:
    return right(q, k, v, step, share, replace(net, rate=-(-net.rate).log()), *rest)


def keys_for_queries(right: Op, q: Any, k: Any, *rest: Any) -> Any:
    return right(k, q, *rest)


def without_silu(right: Op, x: Any, kernel: Any, states: Any, layer: int, batch: Any, silu: bool) -> Any:
    return right(x, kernel, states, layer, batch, False)


def silu_gate(right: Op, gate: Any, x: Any) -> Any:
    return gate * right(gate, x)


def all_pools(right: Op, q: Any, weights: Any, cache: Any, layer: int, batch: Any, spec: Any) -> Any:
    return right(q, weights, cache, layer, batch, replace(spec, top_k=1000))


def one_pool_less(right: Op, q: Any, weights: Any, cache: Any, layer: int, batch: Any, spec: Any) -> Any:
    return right(q, weights, cache, layer, batch, replace(spec, top_k=spec.top_k - 1))


def heads_weigh_alike(right: Op, q: Any, weights: Any, *rest: Any) -> Any:
    return right(q, weights * 0 + 1, *rest)


def no_tail(right: Op, *arguments: Any) -> Any:
    """Tokens after the last whole pool are not attended, but for a query's own."""
    chosen, ratio = right(*arguments), arguments[2].ratio
    for hidden in chosen:
        for seen in hidden[:, 0]:
            position = len(seen) - 1 - int(seen.flip(0).byte().argmin())
            seen[(position + 1) // ratio * ratio : position] = True
    return chosen


def pools_without_positions(right: Op, *arguments: Any) -> Any:
    return right(*arguments[:-1], replace(arguments[-1], position=arguments[-1].position * 0))


def pools_are_means(right: Op, values: Any, gates: Any, *rest: Any) -> Any:
    return right(values, gates * 0, *rest[:-1], replace(rest[-1], position=rest[-1].position * 0))


def keys_not_normed(right: Op, x: Any, norm: Norm, bias: Any) -> Any:
    return x


def scores_over_the_rows_root(
    right: Op, q: Any, none: Any, cache: Any, layer: int, batch: Any, spec: Any, s: Any
) -> Any:
    return right(q, none, cache, layer, batch, replace(spec, scale=spec.rank**-0.5), s)


def with_connection(**changes: Any) -> Op:
    return lambda right, streams, connection: right(streams, replace(connection, **changes))


def mixing_not_transposed(right: Op, streams: Any, connection: Any) -> Any:
    (x, shares), n = right(streams, connection), connection.num_streams
    shares = shares.clone()
    shares[:, n:] = shares[:, n:].view(-1, n, n).transpose(1, 2).reshape(len(x), -1)
    return x, shares


def last_stream(right: Op, streams: Any, num_streams: int) -> Any:
    return streams.chunk(num_streams, -1)[-1]


def not_limited(right: Op, gate: Any, up: Any, limit: float) -> Any:
    return right(gate, up, 1e9)


def gate_limited_below(right: Op, gate: Any, up: Any, limit: float) -> Any:
    return right(gate.clamp(min=-limit), up, limit)


def with_experts(**changes: Any) -> Op:
    return lambda right, x, experts, ids: right(x, replace(experts, **changes), ids)


def with_routing(**changes: Any) -> Op:
    def wrong(right: Op, x: Any, limited: Any, ids: Any) -> Any:
        routing = replace(limited.experts.routing, **changes)
        return right(x, replace(limited, experts=replace(limited.experts, routing=routing)), ids)

    return wrong


MISTAKES: Sequence[tuple[str, dict[str, Op]]] = [
    ("one decay a head", {"kimi_delta": one_decay_a_head}),
    ("decays without a bound", {"kimi_delta": with_net(lower_bound=None)}),
    ("no time bias", {"kimi_delta": no_time_bias}),
    ("rate taken for its logarithm", {"kimi_delta": rate_taken_for_its_logarithm}),
    ("keys for queries", {"kimi_delta": keys_for_queries}),
    ("no silu after the convolutions", {"causal_conv": without_silu}),
    ("silu for sigmoid", {"sigmoid_mul": silu_gate}),
    ("all pools attended", {"select_pools": all_pools}),
    ("one pool less", {"select_pools": one_pool_less}),
    ("index heads weigh alike", {"select_pools": heads_weigh_alike}),
    ("no tail", {"select_pools": no_tail}),
    ("gates without positions", {"compress": pools_without_positions}),
    ("pools are means", {"compress": pools_are_means}),
    ("index keys not normed", {"layer_norm": keys_not_normed}),
    ("scores over the root of a latent", {"latent_attention": scores_over_the_rows_root}),
    ("one turn of balancing", {"read_soft_streams": with_connection(iterations=1)}),
    ("no epsilon on shares", {"read_soft_streams": with_connection(eps=0.0)}),
    ("mixing not transposed", {"read_soft_streams": mixing_not_transposed}),
    ("the last stream for the mean", {"mean_streams": last_stream}),
    ("what all tokens use not limited", {"limited_silu_mul": not_limited}),
    ("gates limited below", {"limited_silu_mul": gate_limited_below}),
    ("experts not limited", {"limited_mixture": with_experts(limit=1e9)}),
    ("the root of a softplus for sigmoid", {"limited_mixture": with_routing(gating=Gating.SQRT_SOFTPLUS)}),
    ("no bias beside scores", {"limited_mixture": with_routing(bias=None)}),
    ("bias weighs", {"limited_mixture": bias_weighs}),
    ("one added to norms", {"rms_norm": norm_plus_one}),
    ("weights normalized", {"limited_mixture": with_routing(normalized=True)}),
    ("weights not scaled", {"limited_mixture": with_routing(scale=1.0)}),
]


@pytest.mark.parametrize(("mistake", "replacements"), MISTAKES, ids=[mistake for mistake, _ in MISTAKES])
def test_a_mistake_in_one_operation_is_seen(mistake: str, replacements: dict[str, Op], files: dict[str, Path]) -> None:
    name = "glm5_next_tight_limits"
    (ids, logits), driver = expected(name), Driver(files[name])
    driver.model = replace(driver.model, ops=Mistaken(driver.ops, replacements))

    assert nmse(driver.run([ids], [[(0, 40)]])[0], logits[:40]) > 10 * TOLERANCE
