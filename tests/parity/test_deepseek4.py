"""deepseek4 over the reference backend: held to transformers in all ways of feeding a prompt, and usual mistakes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pocketllm import LLM, SamplingParams
from pocketllm.engine.backends.api.mixture import Gating
from pocketllm.engine.backends.reference import mixture
from pocketllm.engine.backends.reference.compressed import limited_outputs
from tests.parity.deepseek4_oracle import SPECS
from tests.parity.drive import Driver, Step, chunks, nmse
from tests.parity.test_families import Mistaken
from tests.parity.tiny_families import write_family

ORACLES = Path(__file__).parents[1] / "oracles"
TOLERANCE = 1e-9
NAME = "deepseek4_tight_limits"
FIXTURE = np.load(ORACLES / "deepseek_v4.npz")
IDS, LOGITS = FIXTURE["input_ids"].tolist(), FIXTURE["logits"]
Op = Callable[..., Any]


# -- the fixture: groups of 4 and of 128, in 200 tokens ---------------------------------------------------------------
@pytest.fixture(scope="module")
def fixture() -> Driver:
    return Driver(ORACLES / "deepseek_v4.gguf")


@pytest.fixture(scope="module")
def cold(fixture: Driver) -> np.ndarray:
    fixture.reset()
    return fixture.run([IDS], chunks(200, 200))[0]


STEPS: Sequence[tuple[str, list[Step]]] = [
    ("chunks of seven", chunks(200, 7)),
    ("token by token", [[(0, 1)]] * 40),
    ("token by token past a group of 128", [[(0, 110)], *([[(0, 1)]] * 40)]),
]


def test_one_batch_agrees_with_transformers(cold: np.ndarray) -> None:
    assert nmse(cold, LOGITS) <= TOLERANCE


@pytest.mark.parametrize("steps", [steps for _, steps in STEPS], ids=[way for way, _ in STEPS])
def test_a_prompt_in_pieces_gives_the_bits_of_one_batch(fixture: Driver, cold: np.ndarray, steps: list[Step]) -> None:
    fixture.reset()
    [got] = fixture.run([IDS], steps)

    assert np.array_equal(got, cold[: len(got)])


def test_five_sequences_together_have_the_bits_of_each_alone(fixture: Driver, cold: np.ndarray) -> None:
    lengths = [140, 31, 17, 5, 1]
    fixture.reset()
    first: Step = [(sequence, -(-length // 2)) for sequence, length in enumerate(lengths)]
    rest: Step = [(sequence, length // 2) for sequence, length in reversed(list(enumerate(lengths))) if length > 1]
    together = fixture.run([IDS[:length] for length in lengths], [first, rest])

    for part, length in zip(together, lengths, strict=True):
        assert np.array_equal(part, cold[:length])


def test_a_sequence_that_continues_on_another_s_blocks_and_state_gives_its_bits(
    fixture: Driver, cold: np.ndarray
) -> None:
    fixture.reset()
    fixture.run([IDS], [[(0, 144)]])
    fixture.follow(0, 1)
    [_, warm] = fixture.run([IDS, IDS], [[(1, 16)]])

    assert np.array_equal(warm, cold[144:160])


def test_nothing_of_what_a_slot_held_before_is_read(fixture: Driver, cold: np.ndarray) -> None:
    fixture.reset()
    for states in fixture.states:
        for kept in states.conv:
            kept.fill_(np.nan)
    [got] = fixture.run([IDS], chunks(48, 5))

    assert np.array_equal(got, cold[:48])


# -- other shapes ----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("tiny") / "tiny.gguf", SPECS[NAME])


def error(driver: Driver, size: int = 40) -> float:
    expected = np.load(ORACLES / f"{NAME}.npz")
    [got] = driver.run([expected["input_ids"].tolist()], chunks(40, size))
    return nmse(got, expected["logits"])


@pytest.mark.parametrize(("size", "block_size"), [(40, 16), (7, 5), (1, 6), (9, 128)])
def test_other_groups_streams_and_limits_agree_with_transformers(size: int, block_size: int, other: Path) -> None:
    assert error(Driver(other, block_size=block_size), size) <= TOLERANCE


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.sampled_from([3, 4, 6, 16]))
def test_bits_do_not_depend_on_how_a_prompt_is_cut(cut: list[int], block_size: int) -> None:
    ids = np.load(ORACLES / f"{NAME}.npz")["input_ids"].tolist()
    sizes = [size for number, size in enumerate(cut) if sum(cut[: number + 1]) <= len(ids)]
    driver = property_driver(block_size)
    [whole] = driver.run([ids], [[(0, sum(sizes))]])
    driver.reset()
    [got] = driver.run([ids], [[(0, size)] for size in sizes])

    assert np.array_equal(got, whole)


def property_driver(block_size: int) -> Driver:
    import tempfile

    with tempfile.TemporaryDirectory() as work:
        return Driver(write_family(Path(work) / "tiny.gguf", SPECS[NAME]), block_size=block_size)


# -- mistakes: what each of them changes is outside the tolerance ----------------------------------------------------
def all_entries(right: Op, q: Any, weights: Any, cache: Any, layer: int, batch: Any, spec: Any) -> Any:
    return right(q, weights, cache, layer, batch, replace(spec, top_k=1000))


def one_entry_less(right: Op, q: Any, weights: Any, cache: Any, layer: int, batch: Any, spec: Any) -> Any:
    return right(q, weights, cache, layer, batch, replace(spec, top_k=spec.top_k - 1))


def heads_weigh_alike(right: Op, q: Any, weights: Any, *rest: Any) -> Any:
    return right(q, weights * 0 + 1, *rest)


def with_compressor(**changes: Op) -> Op:
    def wrong(right: Op, *arguments: Any) -> Any:
        how = arguments[-1]
        return right(*arguments[:-1], replace(how, **{name: change(how) for name, change in changes.items()}))

    return wrong


def groups_do_not_overlap(right: Op, values: Any, gates: Any, *rest: Any) -> Any:
    """As if an entry were made of its own group's tokens alone."""
    how = rest[-1]
    if how.overlaps:
        gates = gates.clone()
        gates[:, : how.dim] = -1e30
    return right(values, gates, *rest)


def halves_exchanged(right: Op, values: Any, gates: Any, *rest: Any) -> Any:
    dim = rest[-1].dim if rest[-1].overlaps else 0
    return right(values.roll(dim, 1), gates.roll(dim, 1), *rest)


def window_off_by_one(
    right: Op, q: Any, rows: Any, sinks: Any, states: Any, place: int, batch: Any, spec: Any, *rest: Any
) -> Any:
    kept = states.conv[place]
    states.conv[place] = kept[:, 1:].clone()
    try:
        return right(q, rows, sinks, states, place, batch, replace(spec, window=spec.window - 1), *rest)
    finally:
        states.conv[place] = kept


def no_sinks(right: Op, q: Any, rows: Any, sinks: Any, *rest: Any) -> Any:
    return right(q, rows, sinks - 1e9, *rest)


def window_alone(right: Op, *arguments: Any) -> Any:
    return right(*arguments[:7])


def not_turned_back(right: Op, x: Any, angles: Any, head_dim: int, inverse: bool = False) -> Any:
    return x if inverse else right(x, angles, head_dim)


def first_values_turned(right: Op, x: Any, angles: Any, head_dim: int, inverse: bool = False) -> Any:
    heads = x.view(len(x), -1, head_dim)
    return right(heads.flip(-1).reshape(x.shape), angles, head_dim, inverse).view(heads.shape).flip(-1).reshape(x.shape)


def head_not_normed(right: Op, x: Any, norm: Any) -> Any:
    is_unweighted = bool((norm.weight == 1).all())
    return x if is_unweighted else right(x, norm)


def with_connection(**changes: Any) -> Op:
    return lambda right, streams, connection: right(streams, replace(connection, **changes))


def mixing_not_transposed(right: Op, streams: Any, connection: Any) -> Any:
    x, shares = right(streams, connection)
    if not shares.shape[1]:
        return x, shares
    shares, n = shares.clone(), connection.num_streams
    shares[:, n:] = shares[:, n:].view(-1, n, n).transpose(1, 2).reshape(len(x), -1)
    return x, shares


def mean_for_the_head(right: Op, streams: Any, connection: Any) -> Any:
    x, shares = right(streams, connection)
    return (x, shares) if shares.shape[1] else (streams.view(len(streams), connection.num_streams, -1).mean(1), shares)


def with_experts(**changes: Any) -> Op:
    return lambda right, x, experts, ids: right(x, replace(experts, **changes), ids)


def with_routing(**changes: Any) -> Op:
    def wrong(right: Op, x: Any, limited: Any, ids: Any) -> Any:
        experts = limited.experts
        changed = replace(experts, routing=replace(experts.routing, **changes))
        return right(x, replace(limited, experts=changed), ids)

    return wrong


def bias_weighs(right: Op, x: Any, limited: Any, ids: Any) -> Any:
    own = limited.experts
    if own.routing.bias is None:
        return right(x, limited, ids)
    logits = x @ own.router.weight.T
    chosen, _ = mixture.route(logits, own.routing)
    is_soft = own.routing.gating is Gating.SQRT_SOFTPLUS
    scores = torch.nn.functional.softplus(logits).sqrt() if is_soft else logits.sigmoid()
    weights = (scores + own.routing.bias).gather(-1, chosen)
    if own.routing.normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return mixture.weighted_sum(limited_outputs(x, chosen, limited), weights * own.routing.scale)


def ids_of_the_token_before(right: Op, x: Any, experts: Any, ids: Any) -> Any:
    return right(x, experts, np.roll(ids, 1))


def not_limited(right: Op, gate: Any, up: Any, limit: float) -> Any:
    return right(gate, up, 1e9)


MISTAKES: Sequence[tuple[str, dict[str, Op]]] = [
    ("all entries attended", {"select_entries": all_entries}),
    ("one entry less", {"select_entries": one_entry_less}),
    ("index heads weigh alike", {"select_entries": heads_weigh_alike}),
    ("entries not rotated", {"compress": with_compressor(inv_freq=lambda how: how.inv_freq * 0)}),
    ("gates without positions", {"compress": with_compressor(position=lambda how: how.position * 0)}),
    ("groups do not overlap", {"compress": groups_do_not_overlap}),
    ("halves of a token exchanged", {"compress": halves_exchanged}),
    ("window off by one", {"window_attention": window_off_by_one}),
    ("no sinks", {"window_attention": no_sinks}),
    ("entries not attended", {"window_attention": window_alone}),
    ("not rotated back", {"rope_last": not_turned_back}),
    ("first values rotate", {"rope_last": first_values_turned}),
    ("queries not normed", {"rms_norm": head_not_normed}),
    ("one turn of balancing", {"read_soft_streams": with_connection(iterations=1)}),
    ("no epsilon on shares", {"read_soft_streams": with_connection(eps=0.0)}),
    ("mixing not transposed", {"read_soft_streams": mixing_not_transposed}),
    ("the mean for the head's shares", {"read_soft_streams": mean_for_the_head}),
    ("experts not limited", {"limited_mixture": with_experts(limit=1e9)}),
    ("the shared expert not limited", {"limited_silu_mul": not_limited}),
    ("all layers choose by scores", {"limited_mixture": with_experts(routes=None)}),
    ("another token's experts", {"limited_mixture": ids_of_the_token_before}),
    ("no bias beside scores", {"limited_mixture": with_routing(bias=None)}),
    ("bias weighs", {"limited_mixture": bias_weighs}),
    ("weights not normalized", {"limited_mixture": with_routing(normalized=False)}),
    ("weights not scaled", {"limited_mixture": with_routing(scale=1.0)}),
]


@pytest.mark.parametrize(("mistake", "replacements"), MISTAKES, ids=[mistake for mistake, _ in MISTAKES])
def test_a_mistake_in_one_operation_is_seen(mistake: str, replacements: dict[str, Op], other: Path) -> None:
    driver = Driver(other)
    driver.model = replace(driver.model, ops=Mistaken(driver.ops, replacements))

    assert error(driver) > 10 * TOLERANCE


def test_layers_that_rotate_like_those_of_the_other_kind_are_seen(other: Path) -> None:
    driver = Driver(other)
    right = driver.model
    for mistake in ({"inv_freq": right.compressed_inv_freq}, {"compressed_inv_freq": right.inv_freq}):
        driver.reset()
        driver.model = replace(right, **mistake)

        assert error(driver) > 10 * TOLERANCE


def test_a_magnitude_of_yarn_is_seen(other: Path) -> None:
    driver = Driver(other)
    longer: Op = lambda right, inv_freq, positions, magnitude: right(inv_freq, positions, 1.277)  # noqa: E731  # its type is said beside it, or it is one expression
    driver.model = replace(driver.model, ops=Mistaken(driver.ops, {"rope_angles": longer}))

    assert error(driver) > 10 * TOLERANCE


# -- through the whole engine ----------------------------------------------------------------------------------------
OPTIONS: dict[str, Any] = {"backend": "reference", "threads": 1, "max_model_len": 128}
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=2)


def test_a_prefix_cache_hit_changes_no_token_and_no_logprob(other: Path) -> None:
    prompt = list(range(20, 60))
    with LLM(str(other), prefix_cache=False, **OPTIONS) as llm:
        [cold] = llm.generate([prompt], GREEDY)
    with LLM(str(other), **OPTIONS) as llm:
        llm.generate([[*prompt[:35], 7, 8, 9]], GREEDY)
        [warm] = llm.generate([prompt], GREEDY)
        before = llm.engine.loop.stats().num_step_tokens
        [again] = llm.generate([prompt], GREEDY)
        num_computed = llm.engine.loop.stats().num_step_tokens - before

    assert (warm.usage.cached_tokens, again.usage.cached_tokens, num_computed) == (32, 40, 7)
    assert (warm.token_ids, warm.logprobs) == (cold.token_ids, cold.logprobs)
    assert (again.token_ids, again.logprobs) == (cold.token_ids, cold.logprobs)


def test_eight_requests_of_which_some_are_preempted_get_the_tokens_that_each_gets_alone(other: Path) -> None:
    prompts = [[number, *range(30, 30 + 5 * number)] for number in range(1, 9)]
    with LLM(str(other), prefix_cache=False, max_num_seqs=1, **OPTIONS) as llm:
        alone = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]
    size = 20 * 16 * llm.engine.plan.kv_bytes_per_token // 2
    with LLM(str(other), kv_cache_bytes=size, reserve=0.0, **OPTIONS) as llm:
        together = [answer.token_ids for answer in llm.generate(prompts, GREEDY)]
        num_preemptions = llm.engine.loop.stats().num_preemptions

    assert together == alone
    assert num_preemptions > 0
