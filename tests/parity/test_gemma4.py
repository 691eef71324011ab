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
from tests.parity.drive import Driver, chunks, nmse
from tests.parity.gemma4_oracle import SPECS
from tests.parity.test_families import Mistaken, erf_gelu, norm_plus_one, other_layout, unscaled, with_attention
from tests.parity.tiny_families import write_family

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


def test_logits_that_are_not_capped_are_seen(tmp_path: Path) -> None:
    name = "gemma4_keys_for_values"
    expected = np.load(ORACLES / f"{name}.npz")
    driver = Driver(write_family(tmp_path / "tiny.gguf", SPECS[name]))
    driver.model = replace(driver.model, logit_cap=None)
    [got] = driver.run([expected["input_ids"].tolist()], chunks(40, 40))

    assert nmse(got, expected["logits"]) > 10 * TOLERANCE
