"""Layers that predict further tokens (NextN, MTP) are in many files: told of, not loaded, they change nothing."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from pocketllm.cli.main import app
from pocketllm.engine.backends.select import select_backend
from pocketllm.engine.models.registry import find_family, known_architectures
from pocketllm.engine.options import EngineOptions
from pocketllm.engine.plan import make_plan
from pocketllm.engine.weights.checkpoint import open_checkpoint
from tests.parity.drive import Driver, chunks
from tests.parity.tiny_families import BASE, OWN_BASE, TinyFamily, write_family
from tests.tiny import TinyLlama, write_llama
from tests.unit.test_plan import CAPABILITY

PER_LAYER = (
    *("attention.head_count_kv", "attention.sliding_window_pattern", "attention.compress_ratios"),
    *("swiglu_clamp_exp", "swiglu_clamp_shexp"),
)
ARCHITECTURES = sorted(set(known_architectures()) - {"llama"})


def number_of_layers(architecture: str) -> int:
    return int({**BASE, **OWN_BASE.get(architecture, {})}["block_count"])


def with_nextn(architecture: str) -> TinyFamily:
    """A tiny checkpoint with one such layer behind the others, as exporters write it: counted, and in lists, too."""
    own, last = {**BASE, **OWN_BASE.get(architecture, {})}, number_of_layers(architecture)
    longer = {key: [*own[key], own[key][-1]] for key in PER_LAYER if isinstance(own.get(key), list)}
    tensors = {
        f"blk.{last}.{name}.weight": np.zeros(shape, np.float32)
        for name, shape in (("nextn.eh_proj", (64, 128)), ("nextn.hnorm", (64,)), ("attn_norm", (64,)))
    }
    counted = {"block_count": last + 1, "nextn_predict_layers": 1}
    return TinyFamily(architecture, spoiled={**longer, **counted}, tensors=tensors)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_file_with_such_a_layer_answers_like_the_one_without(architecture: str, tmp_path: Path) -> None:
    ids = [5, 6, 7, 8]
    drivers = [
        Driver(write_family(tmp_path / f"{number}.gguf", spec))
        for number, spec in enumerate((TinyFamily(architecture), with_nextn(architecture)))
    ]
    [plain], [more] = (driver.run([ids], chunks(4, 4)) for driver in drivers)

    assert np.array_equal(plain, more)
    assert drivers[1].model.kv_spec == drivers[0].model.kv_spec


def test_a_layer_behind_the_others_that_is_not_counted_so_is_a_reason(tmp_path: Path) -> None:
    spec = with_nextn("qwen35")
    path = write_family(tmp_path / "x.gguf", replace(spec, spoiled={"block_count": 4}))
    with open_checkpoint(path) as checkpoint:
        [reason] = find_family("qwen35").unmet(checkpoint)

    assert reason.startswith("tensors the family does not know: blk.4.nextn.eh_proj.weight")


@pytest.mark.parametrize("value", [0.5, True, 4])
def test_a_count_of_them_that_cannot_be_is_a_reason(value: Any, tmp_path: Path) -> None:
    path = write_family(tmp_path / "x.gguf", TinyFamily("qwen35", spoiled={"nextn_predict_layers": value}))
    with open_checkpoint(path) as checkpoint:
        reasons = find_family("qwen35").unmet(checkpoint)

    assert any("qwen35.nextn_predict_layers" in reason for reason in reasons)


def test_a_plan_counts_no_bytes_of_them_and_asks_for_no_decoder(tmp_path: Path) -> None:
    """Their one matrix is whole numbers here, which no backend keeps."""
    odd: Any = np.zeros((64, 128), np.int32)
    spec = with_nextn("qwen35")
    with_odd = replace(spec, tensors={**spec.tensors, "blk.4.nextn.eh_proj.weight": odd})
    capability = replace(CAPABILITY, ops=CAPABILITY.ops | find_family("qwen35").capability.required_ops)
    plans = []
    for number, one in enumerate((TinyFamily("qwen35"), with_odd)):
        with open_checkpoint(write_family(tmp_path / f"{number}.gguf", one)) as checkpoint:
            plans.append(make_plan(EngineOptions(model="x"), find_family("qwen35"), capability, checkpoint))

    assert plans[1].weights_bytes == plans[0].weights_bytes


def test_inspect_tells_of_them_on_a_line_and_leaves_them_out_of_the_memory(tmp_path: Path) -> None:
    path = write_family(tmp_path / "x.gguf", with_nextn("xing4_0"))
    page = CliRunner().invoke(app, ["inspect", str(path)])
    report = json.loads(CliRunner().invoke(app, ["inspect", str(path), "--json"]).stdout)

    assert page.exit_code == 0
    assert "not loaded" in page.stdout
    assert "blk.2: 3 tensors" in page.stdout
    assert report["runs"]
    assert report["not_loaded"] == {"layers": [2], "tensors": 3, "bytes": 4 * (64 * 128 + 2 * 64)}
    everything = sum(tensor["bytes"] for tensor in report["tensors"])
    assert report["memory"]["weights_bytes"] == everything - report["not_loaded"]["bytes"]


def test_inspect_has_no_such_line_where_there_are_none(tmp_path: Path) -> None:
    page = CliRunner().invoke(app, ["inspect", str(write_llama(tmp_path / "x.gguf", TinyLlama()))])

    assert page.exit_code == 0
    assert "not loaded" not in page.stdout


def test_layers_that_are_not_computed_are_not_read(tmp_path: Path) -> None:
    path = write_family(tmp_path / "x.gguf", with_nextn("deepseek2"))
    with open_checkpoint(path) as checkpoint:
        read = checkpoint.data

        def data(name: str) -> Any:
            assert not name.startswith("blk.2.")
            return read(name)

        checkpoint.data = data  # type: ignore[method-assign]  # watched for this test alone
        model: Any = find_family("deepseek2").load(checkpoint, select_backend("reference").ops, 64)

    assert len(model.layers) == 2
