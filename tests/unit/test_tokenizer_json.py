"""Kinds of tokenizer.json as they are published, against the tokenizers library: ids, first spaces, BOS and EOS."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Oracle
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

from pocketllm.engine.text.tokenizer import Tokenizer
from pocketllm.engine.weights.huggingface.directory import read_json
from pocketllm.engine.weights.huggingface.tokenizer_json import read_tokenizer
from pocketllm.errors import UnsupportedFeatureError

MARK = "\u2581"
PAGE = (Path(__file__).parents[1] / "parity" / "alice.txt").read_text(encoding="utf-8")
FUZZ = np.load(Path(__file__).parents[1] / "oracles" / "text" / "pre_fuzz.npz")
STRINGS = bytes(FUZZ["strings"]).decode().split("\0")[:200]
TURNS = ["<s>[INST] Hello [/INST]", "[INST]Hello", " leading", "  two", "a</s>b", "</s> b", "plain text", MARK + "mark"]
SPECIAL = ["<s>", "</s>", "<unk>", "[INST]", "[/INST]"]


@cache
def trained(byte_fallback: bool) -> str:
    """A BPE over a page, of pieces with bytes for what they lack or of bytes; as JSON."""
    if byte_fallback:
        tokenizer = Oracle(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        tokenizer.normalizer = normalizers.Replace(" ", MARK)
        special = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    else:
        tokenizer = Oracle(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        )
    tokenizer.train_from_iterator([PAGE], trainer)
    made = json.loads(tokenizer.to_str())
    made["added_tokens"] = made["added_tokens"][: len(SPECIAL)]
    return json.dumps(made)


def both(
    folder: Path, changes: Mapping[str, Any], settings: Mapping[str, Any], config: Mapping[str, Any], pieces: bool
) -> tuple[Tokenizer, Oracle]:
    """Ours over a directory's files, and the library's."""
    made = json.loads(trained(pieces)) | changes
    (folder / "tokenizer.json").write_text(json.dumps(made))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return (
        Tokenizer.from_metadata(read_tokenizer(folder, config, read_json)),
        Oracle.from_file(str(folder / "tokenizer.json")),
    )


def replace() -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": " "}, "content": MARK}


def metaspace(scheme: str, split: bool = False) -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": MARK, "prepend_scheme": scheme, "split": split}


PIECES: Mapping[str, dict[str, Any]] = {
    "llama 2": {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": MARK}, replace()]},
        "pre_tokenizer": None,
    },
    "gemma": {
        "normalizer": replace(),
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
    },
    "mistral 0.3": {"normalizer": None, "pre_tokenizer": metaspace("first")},
    "always": {"normalizer": None, "pre_tokenizer": metaspace("always")},
    "never": {"normalizer": None, "pre_tokenizer": metaspace("never")},
    "in a sequence": {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [metaspace("first")]},
    },
}


@pytest.mark.parametrize("kind", PIECES)
def test_spaces_before_pieces_come_where_the_library_puts_them(kind: str, tmp_path: Path) -> None:
    ours, oracle = both(tmp_path, PIECES[kind], {}, {}, pieces=True)

    for text in [*TURNS, *STRINGS]:
        expected = oracle.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special=False, parse_special=True) == expected, text
        assert ours.encode_rendered(text) == expected, text


def test_pieces_that_are_cut_at_every_space_are_refused(tmp_path: Path) -> None:
    changes = {"normalizer": None, "pre_tokenizer": metaspace("first", split=True)}

    with pytest.raises(UnsupportedFeatureError, match="pre-tokenizer Metaspace with settings that are not read"):
        both(tmp_path, changes, {}, {}, pieces=True)


NORMALIZERS: Mapping[str, Any] = {
    "none": None,
    "deepseek": {"type": "Sequence", "normalizers": []},
    "composed": {"type": "NFC"},
    "composed in a sequence": {"type": "Sequence", "normalizers": [{"type": "NFC"}]},
}


@pytest.mark.parametrize("kind", NORMALIZERS)
def test_bytes_are_composed_first_where_the_file_says_so(kind: str, tmp_path: Path) -> None:
    ours, oracle = both(tmp_path, {"normalizer": NORMALIZERS[kind]}, {}, {}, pieces=False)

    for text in [*STRINGS, "e\u0301 \u1100\u1161"]:
        assert ours.encode(text, add_special=False) == oracle.encode(text, add_special_tokens=False).ids, text


def processor(single: str) -> Any:
    """A post-processor, as JSON."""
    tokenizer = Oracle.from_str(trained(False))
    pairs = [(text, tokenizer.token_to_id(text)) for text in SPECIAL]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=pairs)
    return json.loads(tokenizer.to_str())["post_processor"]


@pytest.mark.parametrize(
    ("changes", "settings", "config", "expected"),
    [
        ({"post_processor": processor("<s> $A")}, {}, {}, ([0], [])),
        # a distilled model's config.json calls the end of a text its beginning
        ({"post_processor": processor("<s> $A")}, {}, {"bos_token_id": 1}, ([0], [])),
        ({}, {"add_bos_token": True, "bos_token": "<s>"}, {"bos_token_id": 1}, ([0], [])),
        ({}, {"add_bos_token": True, "bos_token": {"content": "<s>"}}, {}, ([0], [])),
        ({"post_processor": processor("<s> $A")}, {"add_bos_token": False, "bos_token": "<s>"}, {}, ([], [])),
        ({}, {"add_eos_token": True, "eos_token": "</s>"}, {}, ([], [1])),
        ({}, {"bos_token": "<s>"}, {"bos_token_id": 0}, ([], [])),
    ],
    ids=[
        "template",
        "template against config",
        "settings against config",
        "an added token",
        "settings against template",
        "end",
        "nothing",
    ],
)
def test_bos_and_eos_come_as_the_settings_say_else_as_the_post_processor_does(
    changes: Any, settings: Any, config: Any, expected: tuple[list[int], list[int]], tmp_path: Path
) -> None:
    ours, oracle = both(tmp_path, changes, settings, config, pieces=False)
    middle = oracle.encode("Hello there", add_special_tokens=False).ids

    assert ours.encode("Hello there") == [*expected[0], *middle, *expected[1]]
