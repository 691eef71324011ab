"""gemma4 over the reference backend: other shapes than the fixture's, and the usual mistakes.

That it agrees in all ways of feeding a prompt is tested with the other families, in test_families.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pocketllm.engine.backends.api.ops import Norm
from pocketllm.engine.backends.reference.mixture import expert_outputs, route, weighted_sum
from pocketllm.engine.models.registry import find_family
from tests.parity.drive import Driver, chunks, nmse
from tests.parity.gemma4_oracle import SPECS
from tests.parity.test_families import Mistaken, erf_gelu, norm_plus_one, other_layout, unscaled, with_attention
from tests.parity.tiny_families import decoded, weights, write_family

ORACLES = Path(__file__).parents[1] / "oracles"
TOLERANCE = 1e-9
Op = Callable[..., Any]


@pytest.mark.parametrize("name", SPECS)
def test_other_heads_and_shared_keys_agree_with_transformers(name: str, tmp_path: Path) -> None:
    expected = np.load(ORACLES / f"{name}.npz")
    path = write_family(tmp_path / "tiny.gguf", SPECS[name])
    [got] = Driver(path).run([expected["input_ids"].tolist()], chunks(40, 17))

    assert nmse(got, expected["logits"]) <= TOLERANCE


def values_not_normed(right: Op, x: Any, norm: Norm) -> Any:
    return x if bool((norm.weight == 1).all()) else right(x, norm)


def layers_not_scaled(right: Op, x: Any, factor: float) -> Any:
    return x


def first_input_for_all(right: Op, x: Any, first: int, last: int) -> Any:
    return right(x, 0, last - first)


def window_off_by_one(right: Op, q: Any, cache: Any, layer: int, batch: Any, spec: Any) -> Any:
    return right(q, cache, layer, batch, spec if spec.window is None else replace(spec, window=spec.window + 1))


MISTAKES: Sequence[tuple[str, dict[str, Op]]] = [
    ("neighbors rotate", {"rope": other_layout}),
    ("one added to norms", {"rms_norm": norm_plus_one}),
    ("values not normed", {"rms_norm": values_not_normed}),
    ("gelu by erf", {"gelu_mul": erf_gelu}),
    ("embedding not scaled", {"embed": unscaled}),
    ("scores over the root of the head", {"attention": with_attention(scale=0.25)}),
    ("all layers global", {"attention": with_attention(window=None)}),
    ("window off by one", {"attention": window_off_by_one}),
    ("layers not scaled", {"scale": layers_not_scaled}),
    ("one input for all layers", {"columns": first_input_for_all}),
]


@pytest.mark.parametrize(("mistake", "replacements"), MISTAKES, ids=[mistake for mistake, _ in MISTAKES])
def test_a_mistake_in_one_operation_is_seen(mistake: str, replacements: dict[str, Op], tmp_path: Path) -> None:
    name = "gemma4_shared_keys"
    expected = np.load(ORACLES / f"{name}.npz")
    driver = Driver(write_family(tmp_path / "tiny.gguf", SPECS[name]))
    driver.model = replace(driver.model, ops=Mistaken(driver.ops, replacements))
    [got] = driver.run([expected["input_ids"].tolist()], chunks(40, 40))

    assert nmse(got, expected["logits"]) > 10 * TOLERANCE


@pytest.mark.parametrize(
    "mistake",
    [
        lambda model: {"global_freq": model.local_freq},
        lambda model: {"inputs": replace(model.inputs, norm=Norm(model.inputs.norm.weight * 2**0.5, 1e-6))},
    ],
    ids=["global layers rotate like local ones", "own inputs not halved"],
)
def test_a_mistake_at_load_is_seen(mistake: Callable[[Any], dict[str, Any]], tmp_path: Path) -> None:
    name = "gemma4_shared_keys"
    expected = np.load(ORACLES / f"{name}.npz")
    driver = Driver(write_family(tmp_path / "tiny.gguf", SPECS[name]))
    driver.model = replace(driver.model, **mistake(driver.model))
    [got] = driver.run([expected["input_ids"].tolist()], chunks(40, 40))

    assert nmse(got, expected["logits"]) > 10 * TOLERANCE


# -- the mixture -----------------------------------------------------------------------------------------------------
MIXTURE = "gemma4_mixture"


def of_mixture(driver: Driver) -> float:
    """How far a driver is from transformers."""
    expected = np.load(ORACLES / f"{MIXTURE}.npz")
    [got] = driver.run([expected["input_ids"].tolist()], chunks(40, 40))
    return nmse(got, expected["logits"])


def test_experts_whose_halves_are_two_tensors_are_the_same(tmp_path: Path) -> None:
    spec, halves = SPECS[MIXTURE], {}
    for name, values in weights(spec).items():
        if "gate_up" in name:
            gate, up = np.split(values, 2, axis=1)
            halves |= {name: None, name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
    path = write_family(tmp_path / "tiny.gguf", replace(spec, tensors={**spec.tensors, **halves}))

    assert of_mixture(Driver(path)) <= TOLERANCE


def test_packed_halves_of_one_tensor_compute_what_they_stand_for(tmp_path: Path) -> None:
    own = SPECS[MIXTURE]
    packed = replace(own, keys={**own.keys, "expert_feed_forward_length": 64}, quant_type="Q8_0")
    plain = replace(packed, quant_type="F32", tensors={**own.tensors, **decoded(packed)})
    ids = np.random.RandomState(7).randint(0, 512, 20).tolist()
    [got], [expected] = (
        Driver(write_family(tmp_path / name, spec)).run([ids], chunks(20, 20))
        for name, spec in (("packed", packed), ("plain", plain))
    )

    assert any("gate_up" in name for name in decoded(packed))
    assert np.array_equal(got, expected)


def routed_by_what_experts_read(right: Op, x: Any, routed_by: Any, experts: Any) -> Any:
    return right(x, x, experts)


def experts_not_scaled(right: Op, x: Any, routed_by: Any, experts: Any) -> Any:
    return right(x, routed_by, replace(experts, scale=experts.scale * 0 + 1))


def halves_exchanged(right: Op, x: Any, routed_by: Any, experts: Any) -> Any:
    own = experts.experts
    return right(x, routed_by, replace(experts, experts=replace(own, gate=own.up, up=own.gate)))


def with_routing(**changes: Any) -> Op:
    def wrong(right: Op, x: Any, routed_by: Any, experts: Any) -> Any:
        own = experts.experts
        changed = replace(own, routing=replace(own.routing, **changes))
        return right(x, routed_by, replace(experts, experts=changed))

    return wrong


def silu_for_gelu(right: Op, x: Any, routed_by: Any, experts: Any) -> Any:
    own = experts.experts
    chosen, shares = route(routed_by @ own.router.weight.T, own.routing)
    return weighted_sum(expert_outputs(x, chosen, own.gate, own.up, own.down), shares * experts.scale[chosen])


# that weights are normalized is not to be seen: the norm after them takes any factor
OF_EXPERTS: Sequence[tuple[str, Op]] = [
    ("routed by what experts read", routed_by_what_experts_read),
    ("experts not scaled", experts_not_scaled),
    ("gates and values exchanged", halves_exchanged),
    ("one expert less", with_routing(num_used=2)),
    ("silu for gelu", silu_for_gelu),
]


@pytest.mark.parametrize(("mistake", "wrong"), OF_EXPERTS, ids=[mistake for mistake, _ in OF_EXPERTS])
def test_a_mistake_with_experts_is_seen(mistake: str, wrong: Op, tmp_path: Path) -> None:
    driver = Driver(write_family(tmp_path / "tiny.gguf", SPECS[MIXTURE]))
    driver.model = replace(driver.model, ops=Mistaken(driver.ops, {"scaled_mixture": wrong}))

    assert of_mixture(driver) > 10 * TOLERANCE


@pytest.mark.parametrize("norm", ["shared_norm", "router_norm", "before", "after"])
def test_a_norm_beside_experts_that_is_another_s_is_seen(norm: str, tmp_path: Path) -> None:
    driver = Driver(write_family(tmp_path / "tiny.gguf", SPECS[MIXTURE]))
    layers = [replace(layer, mixture=replace(layer.mixture, **{norm: layer.ffn_norm})) for layer in driver.model.layers]
    driver.model = replace(driver.model, layers=layers)

    assert of_mixture(driver) > 10 * TOLERANCE


def test_a_backend_without_such_experts_runs_the_others_and_is_named_for_the_mixture(tmp_path: Path) -> None:
    capability = find_family("gemma4").capability
    metadata = {"general.architecture": "gemma4"}

    assert "scaled_mixture" not in capability.ops_of(metadata)
    assert "scaled_mixture" not in capability.ops_of({**metadata, "gemma4.expert_count": 0})
    assert "scaled_mixture" in capability.ops_of({**metadata, "gemma4.expert_count": 8})


def test_logits_that_are_not_capped_are_seen(tmp_path: Path) -> None:
    name = "gemma4_keys_for_values"
    expected = np.load(ORACLES / f"{name}.npz")
    driver = Driver(write_family(tmp_path / "tiny.gguf", SPECS[name]))
    driver.model = replace(driver.model, logit_cap=None)
    [got] = driver.run([expected["input_ids"].tolist()], chunks(40, 40))

    assert nmse(got, expected["logits"]) > 10 * TOLERANCE
