"""What a config.json leaves out is what transformers takes for it: published ones leave out much."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from pocketllm.engine.weights.checkpoint import open_checkpoint
from pocketllm.engine.weights.huggingface.directory import known
from tests.parity.drive import Driver, chunks, nmse
from tests.parity.test_huggingface import MODELS, TOLERANCE, logits_of, write_directory

torch = pytest.importorskip("torch", reason="missing-extra: oracle (torch)")
transformers = pytest.importorskip("transformers", reason="missing-extra: oracle (transformers)")
pytestmark = pytest.mark.oracle

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers")
"""What every published config.json says."""


@pytest.mark.parametrize("stem", sorted(set(known().values())))
def test_defaults_are_those_of_the_class(stem: str) -> None:
    module = import_module(f"pocketllm.engine.weights.huggingface.names.{stem}")
    theirs = transformers.CONFIG_MAPPING[module.MODEL_TYPES[0]]().to_dict()
    rope = theirs["rope_parameters"]
    theirs["rope_theta"] = rope.get("full_attention", rope)["rope_theta"]

    assert {name: theirs[name] for name in module.DEFAULTS} == module.DEFAULTS


def without_defaults(folder: Path) -> dict[str, Any]:
    """Drop from config.json what the class takes anyway; what is left."""
    config = json.loads((folder / "config.json").read_text())
    theirs = transformers.CONFIG_MAPPING[config["model_type"]]().to_dict()
    kept = {name: value for name, value in config.items() if name in SIZES or value != theirs.get(name)}
    kept |= {"model_type": config["model_type"]}
    if config["rope_parameters"] == theirs["rope_parameters"]:
        kept.pop("rope_parameters", None)
    (folder / "config.json").write_text(json.dumps(kept))
    return kept


@pytest.mark.parametrize("name", MODELS)
def test_a_config_without_what_is_default_reads_as_the_whole_one(name: str, tmp_path: Path) -> None:
    folder, _ = write_directory(tmp_path / name, name, torch.bfloat16)
    with open_checkpoint(folder) as checkpoint:
        whole = dict(checkpoint.metadata)
    num_keys = len(json.loads((folder / "config.json").read_text()))

    assert len(without_defaults(folder)) < num_keys - 5
    with open_checkpoint(folder) as checkpoint:
        assert dict(checkpoint.metadata) == whole


def test_a_gemma_3_that_says_only_its_width_and_depth_agrees_with_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = {"vocab_size": 384, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7, "sliding_window": 9}
    monkeypatch.setitem(MODELS, "gemma3", ("Gemma3", {**says, "bos_token_id": 0, "eos_token_id": 1}))
    folder, model = write_directory(tmp_path / "gemma3", "gemma3", torch.bfloat16)
    scaled = {"factor": 8.0, "rope_type": "linear"}
    config = {"model_type": "gemma3", "text_config": {**says, "model_type": "gemma3_text", "rope_scaling": scaled}}
    (folder / "config.json").write_text(json.dumps(config))
    theirs = model.config
    theirs.rope_parameters["full_attention"] |= scaled
    model.model.rotary_emb = type(model.model.rotary_emb)(theirs)
    ids = list(range(40, 80))
    [got] = Driver(folder).run([ids], chunks(len(ids), 11))

    assert nmse(got, logits_of(model, ids)) <= TOLERANCE
