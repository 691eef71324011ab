"""qwen4exp over the reference backend: other shapes than the fixture's, and the usual mistakes.

That it agrees in all ways of feeding a prompt is tested with the other families, in test_families.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parity.drive import Driver, chunks, nmse
from tests.parity.qwen4exp_oracle import SPECS
from tests.parity.test_families import Mistaken, norm_plus_one, with_routing
from tests.parity.tiny_families import write_family

ORACLES = Path(__file__).parents[1] / "oracles"
TOLERANCE = 1e-9
NAME = "qwen4exp_long_ngrams"
Op = Callable[..., Any]


def error(driver: Driver, size: int) -> float:
    expected = np.load(ORACLES / f"{NAME}.npz")
    [got] = driver.run([expected["input_ids"].tolist()], chunks(40, size))
    return nmse(got, expected["logits"])


@pytest.mark.parametrize("size", [40, 7, 1], ids=["one batch", "chunks of seven", "token by token"])
def test_other_streams_groups_and_ngrams_agree_with_transformers(size: int, tmp_path: Path) -> None:
    assert error(Driver(write_family(tmp_path / "tiny.gguf", SPECS[NAME])), size) <= TOLERANCE


# -- mistakes: what each of them changes is outside the tolerance ----------------------------------------------------
def all_tokens(right: Op, q: Any, cache: Any, layer: int, batch: Any, index: Any) -> Any:
    return right(q, cache, layer, batch, replace(index, num_best=1000))


def one_group_less(right: Op, q: Any, cache: Any, layer: int, batch: Any, index: Any) -> Any:
    return right(q, cache, layer, batch, replace(index, num_best=index.num_best - 1))


def groups_not_rotated(right: Op, q: Any, cache: Any, layer: int, batch: Any, index: Any) -> Any:
    return right(q, cache, layer, batch, replace(index, inv_freq=index.inv_freq * 0))


def silu_for_sigmoid(right: Op, gate: Any, x: Any) -> Any:
    is_of_heads = gate.shape[1] == 120
    return right(gate, x) * gate if is_of_heads else right(gate, x)


def taps_side_by_side(right: Op, x: Any, kernel: Any, states: Any, *rest: Any, silu: bool, dilation: int = 1) -> Any:
    if dilation == 1:
        return right(x, kernel, states, *rest, silu=silu)
    padded = states.conv[0]
    states.conv[0] = padded[:, : kernel.shape[1] - 1]
    try:
        return right(x, kernel, states, *rest, silu=silu)
    finally:
        states.conv[0] = padded


def with_ngrams(**changes: Any) -> Op:
    return lambda right, table, ngrams, *rest: right(table, replace(ngrams, **changes), *rest)


def ngrams_of_a_text_before(right: Op, table: Any, ngrams: Any, *rest: Any) -> Any:
    """As if an end-of-text token were any other; before a sequence it still stands."""
    return right(table, replace(ngrams, end_token=511), *rest)


def gates_not_doubled(right: Op, streams: Any, gates: Any, y: Any) -> Any:
    return right(streams, gates, y / 2)


def first_stream(right: Op, streams: Any, num_streams: int) -> Any:
    return streams.chunk(num_streams, -1)[0]


def one_gate_for_all(right: Op, keys: Any, queries: Any, value: Any) -> Any:
    width = value.shape[-1]
    return right(keys[:, :width].repeat(1, 3), queries[:, :width].repeat(1, 3), value)


def stream_weights_left_out(right: Op, x: Any, y: Any) -> Any:
    return x


MISTAKES: Sequence[tuple[str, dict[str, Op]]] = [
    ("all tokens attended", {"select_groups": all_tokens}),
    ("one group less", {"select_groups": one_group_less}),
    ("groups not rotated", {"select_groups": groups_not_rotated}),
    ("silu for sigmoid", {"sigmoid_mul": silu_for_sigmoid}),
    ("taps side by side", {"causal_conv": taps_side_by_side}),
    ("offsets left out", {"ngram_embed": with_ngrams(offsets=[0] * 6)}),
    ("multipliers in another order", {"ngram_embed": with_ngrams(multipliers=[69069, 16777619, 48271, 1000003])}),
    ("n-grams across an end of text", {"ngram_embed": ngrams_of_a_text_before}),
    ("gates not doubled", {"add_gated": gates_not_doubled}),
    ("the first stream for their mean", {"mean_streams": first_stream}),
    ("one gate for all streams", {"gate_streams": one_gate_for_all}),
    ("streams' weights left out", {"mul": stream_weights_left_out}),
    ("one added to norms again", {"rms_norm": norm_plus_one}),
    ("weights not normalized", {"mixture": with_routing(normalized=False)}),
]


@pytest.mark.parametrize(("mistake", "replacements"), MISTAKES, ids=[mistake for mistake, _ in MISTAKES])
def test_a_mistake_in_one_operation_is_seen(mistake: str, replacements: dict[str, Op], tmp_path: Path) -> None:
    driver = Driver(write_family(tmp_path / "tiny.gguf", SPECS[NAME]))
    driver.model = replace(driver.model, ops=Mistaken(driver.ops, replacements))

    assert error(driver, 40) > 10 * TOLERANCE
