"""Families of experts with attention of their own: other shapes than the fixtures', and the usual mistakes.

That they agree in all ways of feeding a prompt is tested with the other families, in test_families.py.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pocketllm.engine.backends.api.mixture import Gating
from pocketllm.engine.backends.api.ops import Norm, RopeLayout
from pocketllm.engine.backends.reference import mixture
from pocketllm.engine.backends.reference.ops import ReferenceOps
from tests.parity.drive import Driver, chunks, nmse
from tests.parity.expert_oracle import SPECS
from tests.parity.test_families import Mistaken, other_layout, with_routing
from tests.parity.tiny_families import TinyFamily, write_family

ORACLES = Path(__file__).parents[1] / "oracles"
TOLERANCE = 1e-9


@pytest.mark.parametrize("name", SPECS)
def test_other_shapes_groups_and_scalings_agree_with_transformers(name: str, tmp_path: Path) -> None:
    expected = np.load(ORACLES / f"{name}.npz")
    path = write_family(tmp_path / "tiny.gguf", SPECS[name])
    [got] = Driver(path).run([expected["input_ids"].tolist()], chunks(40, 17))

    assert nmse(got, expected["logits"]) <= TOLERANCE


class Loaded:
    """A backend's operations that note what matrices are loaded: their type and shape."""

    def __init__(self, ops: Any) -> None:
        self.ops, self.matrices = ops, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ops, name)

    def load_matrix(self, data: Any, quant_type: str, shape: tuple[int, int]) -> Any:
        self.matrices.append((quant_type, tuple(shape)))
        return self.ops.load_matrix(data, quant_type, shape)


@pytest.mark.parametrize("architecture", ["qwen3moe", "qwen35moe", "minimax-m2", "gpt-oss", "deepseek2", "deepseek4"])
def test_a_packed_router_is_loaded_as_floats_for_rounded_rows_would_choose_other_experts(
    architecture: str, tmp_path: Path
) -> None:
    spec = TinyFamily(architecture, 71, {"expert_count": 7, "expert_used_count": 2}, quant_type="Q8_0")
    loaded = Loaded(ReferenceOps())
    Driver(write_family(tmp_path / "tiny.gguf", spec), ops=loaded)

    assert ("F32", (7, 64)) in loaded.matrices
    assert ("Q8_0", (7, 64)) not in loaded.matrices


# -- mistakes: what each of them changes is outside the tolerance ----------------------------------------------------
def halves_rotate(right: Callable[..., Any], x: Any, angles: Any, head_dim: int, layout: RopeLayout) -> Any:
    return right(x, angles, head_dim, RopeLayout.HALF_SPLIT)


def keys_alone_rotate(right: Callable[..., Any], x: Any, angles: Any, head_dim: int, layout: RopeLayout) -> Any:
    return right(x, angles, head_dim, layout) if x.shape[-1] == head_dim else x


def norm_plus_one(right: Callable[..., Any], x: Any, norm: Norm) -> Any:
    return right(x, Norm(norm.weight + 1, norm.eps))


def latent_not_normed(right: Callable[..., Any], x: Any, norm: Norm) -> Any:
    return x if len(norm.weight) == 32 else right(x, norm)


def heads_in_another_order(right: Callable[..., Any], x: Any, weight: Any) -> Any:
    return right(x, weight.flip(0))


def scores_over_the_rows_root(right: Callable[..., Any], *arguments: Any) -> Any:
    *others, spec, selection = arguments
    return right(*others, replace(spec, scale=(spec.rank + spec.rope_dim) ** -0.5), selection)


def scores_not_grown(right: Callable[..., Any], *arguments: Any) -> Any:
    *others, spec, selection = arguments
    return right(*others, replace(spec, scale=32**-0.5), selection)


def shared_expert_left_out(right: Callable[..., Any], x: Any, projection: Any, residual: Any) -> Any:
    return residual if projection.weight.shape[1] in (32, 64) else right(x, projection, residual)


def bias_weighs(right: Callable[..., Any], x: Any, experts: Any) -> Any:
    routing = experts.routing
    chosen, _ = mixture.route(x @ experts.router.weight.T, routing)
    weights = ((x @ experts.router.weight.T).sigmoid() + routing.bias).gather(-1, chosen)
    weights = weights / weights.sum(-1, keepdim=True) * routing.scale
    outputs = mixture.expert_outputs(x, chosen, experts.gate, experts.up, experts.down)
    return mixture.weighted_sum(outputs, weights)


def transposed(right: Callable[..., Any], streams: Any, shares: Any, y: Any) -> Any:
    mixing = shares[:, 4:].view(-1, 4, 4).transpose(1, 2).reshape(-1, 16)
    return right(streams, torch.cat([shares[:, :4], mixing], -1), y)


def last_stream(right: Callable[..., Any], streams: Any, num_streams: int) -> Any:
    return streams.chunk(num_streams, -1)[-1]


def not_scaled(right: Callable[..., Any], x: Any, factor: float) -> Any:
    return x


def sinks_that_drown(right: Callable[..., Any], q: Any, sinks: Any, *rest: Any) -> Any:
    return right(q, sinks - 1e9, *rest)


def window_off_by_one(right: Callable[..., Any], *arguments: Any) -> Any:
    *others, spec = arguments
    return right(*others, replace(spec, window=spec.window + 1))


def first_heads_norm_for_all(right: Callable[..., Any], x: Any, norm: Norm) -> Any:
    """Over each head, with the weights of the first: as for families that norm heads."""
    return right(x, Norm(norm.weight[:16], norm.eps)) if len(x.shape) == 2 and x.shape[-1] == 32 else right(x, norm)


def all_keys(right: Callable[..., Any], *arguments: Any) -> Any:
    return None


def one_key_more(right: Callable[..., Any], *arguments: Any) -> Any:
    *others, spec = arguments
    return right(*others, replace(spec, top_k=spec.top_k + 1))


def index_heads_weigh_the_same(right: Callable[..., Any], q: Any, weights: Any, *rest: Any) -> Any:
    return right(q, torch.ones_like(weights), *rest)


def not_normed(right: Callable[..., Any], x: Any, norm: Norm, bias: Any) -> Any:
    return x


def rms_for_layer_norm(right: Callable[..., Any], x: Any, norm: Norm, bias: Any) -> Any:
    return torch.nn.functional.rms_norm(x, norm.weight.shape, norm.weight, norm.eps) + bias


def connected(**changes: Any) -> Callable[..., Any]:
    return lambda right, streams, connection: right(streams, replace(connection, **changes))


MISTAKES: Sequence[tuple[str, str, dict[str, Callable[..., Any]]]] = [
    ("deepseek_v2", "halves rotate", {"rope": halves_rotate}),
    ("deepseek_v2", "keys alone rotate", {"rope": keys_alone_rotate}),
    ("deepseek_v2", "one added to norms", {"rms_norm": norm_plus_one}),
    ("deepseek_v2", "latent not normed", {"rms_norm": latent_not_normed}),
    ("deepseek_v2", "heads in another order", {"project_heads": heads_in_another_order}),
    ("deepseek_v2", "scores over the root of a cached row", {"latent_attention": scores_over_the_rows_root}),
    ("deepseek_v2", "weights normalized", {"mixture": with_routing(normalized=True)}),
    ("deepseek_v2", "weights not scaled", {"mixture": with_routing(scale=1.0)}),
    ("deepseek_v2", "sigmoid for softmax", {"mixture": with_routing(gating=Gating.SIGMOID)}),
    ("deepseek_v2", "no shared expert", {"project_add": shared_expert_left_out}),
    ("deepseek_v3", "weights not normalized", {"mixture": with_routing(normalized=False)}),
    ("deepseek_v3", "softmax for sigmoid", {"mixture": with_routing(gating=Gating.SOFTMAX)}),
    ("deepseek_v3", "bias left out", {"mixture": with_routing(bias=None)}),
    ("deepseek_v3", "bias weighs", {"mixture": bias_weighs}),
    ("glm_moe_dsa", "all keys attended", {"select_keys": all_keys}),
    ("glm_moe_dsa", "one key more", {"select_keys": one_key_more}),
    ("glm_moe_dsa", "index heads weigh the same", {"select_keys": index_heads_weigh_the_same}),
    ("glm_moe_dsa", "index keys not normed", {"layer_norm": not_normed}),
    ("glm_moe_dsa", "index keys normed around zero", {"layer_norm": rms_for_layer_norm}),
    ("glm_moe_dsa", "halves rotate", {"rope": halves_rotate}),
    ("glm_moe_dsa", "bias weighs", {"mixture": bias_weighs}),
    ("minimax_m2", "neighbors rotate", {"rope": other_layout}),
    ("minimax_m2", "keys normed by head", {"rms_norm": first_heads_norm_for_all}),
    ("minimax_m2", "bias weighs", {"mixture": bias_weighs}),
    ("minimax_m2", "bias left out", {"mixture": with_routing(bias=None)}),
    ("minimax_m2", "weights not normalized", {"mixture": with_routing(normalized=False)}),
    ("mimo_v2_flash", "neighbors rotate", {"rope": other_layout}),
    ("mimo_v2_flash", "values not scaled", {"scale": not_scaled}),
    ("mimo_v2_flash", "no sink", {"sink_attention": sinks_that_drown}),
    ("mimo_v2_flash", "window off by one", {"sink_attention": window_off_by_one}),
    ("mimo_v2_flash", "bias weighs", {"mixture": bias_weighs}),
    ("xing4_f32", "halves rotate", {"rope": halves_rotate}),
    ("xing4_f32", "scores not grown", {"latent_attention": scores_not_grown}),
    ("xing4_f32", "bias weighs", {"mixture": bias_weighs}),
    ("xing4_f32", "no shared expert", {"project_add": shared_expert_left_out}),
    ("xing4_f32", "streams mixed by the transpose", {"write_streams": transposed}),
    ("xing4_f32", "rows and columns not balanced", {"read_streams": connected(iterations=1)}),
    ("xing4_f32", "the last stream for the mean", {"mean_streams": last_stream}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "mistake", "replacements"), MISTAKES, ids=[f"{n}: {m}" for n, m, _ in MISTAKES])
def test_a_mistake_in_one_operation_is_seen(
    name: str, mistake: str, replacements: dict[str, Callable[..., Any]]
) -> None:
    assert error_of(Driver(ORACLES / f"{name}.gguf"), name, ops=replacements) > 10 * TOLERANCE


def error_of(driver: Driver, name: str, ops: dict[str, Callable[..., Any]] | None = None, **changes: Any) -> float:
    """NMSE of a model that is changed."""
    expected = np.load(ORACLES / f"{name}.npz")
    driver.model = replace(driver.model, ops=Mistaken(driver.ops, ops or {}), **changes)
    [got] = driver.run([expected["input_ids"].tolist()], chunks(len(expected["input_ids"]), 48))
    return nmse(got, expected["logits"])


@pytest.mark.parametrize("name", ["deepseek_v3_groups", "xing4_three_streams"])
def test_a_scaling_that_multiplies_the_angles_as_well_is_seen(name: str, tmp_path: Path) -> None:
    driver = Driver(write_family(tmp_path / "tiny.gguf", SPECS[name]))

    assert error_of(driver, name, rope_magnitude=1 + 0.1 * math.log(40)) > 10 * TOLERANCE


@pytest.mark.parametrize(("name", "best"), [("deepseek_v2_groups", 2), ("deepseek_v3_groups", 1)])
def test_a_group_that_is_judged_by_another_number_of_experts_is_seen(name: str, best: int, tmp_path: Path) -> None:
    driver = Driver(write_family(tmp_path / "tiny.gguf", SPECS[name]))

    assert error_of(driver, name, ops={"mixture": with_routing(best_of_group=best)}) > 10 * TOLERANCE


def test_experts_that_are_chosen_without_groups_are_seen(tmp_path: Path) -> None:
    driver = Driver(write_family(tmp_path / "tiny.gguf", SPECS["deepseek_v3_groups"]))

    assert error_of(driver, "deepseek_v3_groups", ops={"mixture": with_routing(num_groups=1)}) > 10 * TOLERANCE


@pytest.mark.parametrize("mistake", ["local layers rotate like global ones", "global like local ones"])
def test_a_mimo2_layer_that_rotates_with_the_others_base_is_seen(mistake: str) -> None:
    driver = Driver(ORACLES / "mimo_v2_flash.gguf")
    right = driver.model
    changes = {"local_freq": right.global_freq} if "local layers" in mistake else {"global_freq": right.local_freq}

    assert error_of(driver, "mimo_v2_flash", **changes) > 10 * TOLERANCE


def test_a_glm_layer_that_picks_anew_where_it_should_not_is_seen(tmp_path: Path) -> None:
    """Its indexer taken from the layer before, at its own input."""
    driver = Driver(write_family(tmp_path / "tiny.gguf", SPECS["glm_dsa_shared"]))
    layers = list(driver.model.layers)
    layers[4] = replace(layers[4], indexer=layers[3].indexer)

    assert error_of(driver, "glm_dsa_shared", layers=layers) > 10 * TOLERANCE


def test_streams_may_leave_the_range_of_half_precision() -> None:
    """As they do in the trained model; a backend that rounds them to half would answer with infinities."""
    ids = np.load(ORACLES / "xing4_f32.npz")["input_ids"].tolist()
    driver = Driver(ORACLES / "xing4_f32.gguf")

    def louder(right: Callable[..., Any], table: Any, ids: Any, scale: float = 1.0) -> Any:
        return right(table, ids, scale=1e6)

    def in_half(right: Callable[..., Any], *arguments: Any) -> Any:
        return right(*arguments).half().float()

    right = driver.model
    driver.model = replace(right, ops=Mistaken(driver.ops, {"embed": louder}))
    [loud] = driver.run([ids], chunks(48, 48))
    driver.reset()
    driver.model = replace(right, ops=Mistaken(driver.ops, {"embed": louder, "write_streams": in_half}))
    [rounded] = driver.run([ids], chunks(48, 48))

    assert np.isfinite(loud).all()
    assert not np.isfinite(rounded).all()
