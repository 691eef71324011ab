"""tokenizer.json and tokenizer_config.json as GGUF's `tokenizer.ggml.*` keys.

Two kinds are read. Byte-level BPE keeps its own patterns under `tokenizer.huggingface.*`, so that no name of a pre type
need be guessed. Pieces with bytes for what they lack (SentencePiece's BPE) merge in the order of their ids, which is
what scores that fall with the id say.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pocketllm.errors import CheckpointError, UnsupportedFeatureError

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The pattern within `ByteLevel(use_regex=True)`."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "\u2581"
ENDS = ("eos", "eot", "eom")
"""GGUF's names of tokens that end an answer."""


def read_tokenizer(path: Path, config: Mapping[str, Any], read: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """GGUF keys of a directory's tokenizer, empty where it has none; UnsupportedFeatureError for another kind."""
    if not (path / "tokenizer.json").is_file():
        return {}
    tokenizer = read(path / "tokenizer.json")
    settings = read(path / "tokenizer_config.json") if (path / "tokenizer_config.json").is_file() else {}
    model = tokenizer.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE" or not isinstance(model.get("vocab"), dict):
        raise unsupported(
            f"model {model.get('type') if isinstance(model, dict) else model!r:.40}, but only BPE is read"
        )
    tokens, types = _tokens(tokenizer, model, config)
    keys = _pieces(tokenizer, model) if model.get("byte_fallback") else _byte_level(tokenizer, model)
    keys |= {"tokens": tokens, "token_type": types, **_named_ids(tokens, config, settings)}
    keys |= _added_ends(tokenizer, tokens, settings)
    if model.get("byte_fallback"):
        keys["scores"] = [-float(index) for index in range(len(tokens))]
    made = {f"tokenizer.ggml.{name}" if "." not in name else name: value for name, value in keys.items()}
    template = _template(path, settings)
    return made | ({"tokenizer.chat_template": template} if template is not None else {})


def unsupported(reason: str) -> UnsupportedFeatureError:
    """A sentence on tokenizer.json."""
    return UnsupportedFeatureError("tokenizer", [f"tokenizer.json has {reason}"])


def _tokens(
    tokenizer: Mapping[str, Any], model: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[list[str], list[int]]:
    """Tokens by id with GGUF's types; ids that nothing names are UNUSED, up to the embedding's rows."""
    added = {row["id"]: row for row in tokenizer.get("added_tokens", [])}
    by_id = {index: text for text, index in model["vocab"].items()} | {
        index: row["content"] for index, row in added.items()
    }
    rows = config.get("vocab_size")
    count = max(max(by_id, default=-1) + 1, rows if isinstance(rows, int) else 0)
    tokens = [by_id.get(index, f"[PAD{index}]") for index in range(count)]
    types = [NORMAL if index in by_id else UNUSED for index in range(count)]
    for index, row in added.items():
        types[index] = CONTROL if row.get("special") else USER_DEFINED
    for byte in range(256) if model.get("byte_fallback") else ():
        index = model["vocab"].get(f"<0x{byte:02X}>")
        if index is not None:
            types[index] = BYTE
    unknown = model["vocab"].get(model.get("unk_token"))
    if unknown is not None:
        types[unknown] = UNKNOWN
    return tokens, types


def _byte_level(tokenizer: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    kinds = [step.get("type") for step in _normalizers(tokenizer)]
    if set(kinds) - {"NFC"}:
        raise unsupported(f"normalizer {', '.join(map(str, kinds))}, but only NFC or none is read")
    splits = [pattern for step in _steps(tokenizer.get("pre_tokenizer")) for pattern in _patterns(step)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", [])]
    return {
        "model": "gpt2",
        "merges": merges,
        "tokenizer.huggingface.splits": splits,
        "tokenizer.huggingface.ignore_merges": bool(model.get("ignore_merges")),
        "tokenizer.huggingface.nfc": bool(kinds),
    }


def _normalizers(tokenizer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What text is changed by before it is cut, one after the other."""
    normalizer = tokenizer.get("normalizer") or {}
    return list(normalizer.get("normalizers", [normalizer])) if normalizer else []


def _steps(step: Any) -> list[Mapping[str, Any]]:
    """The steps of a sequence, or the one."""
    if not isinstance(step, dict):
        return []
    return list(step["pretokenizers"]) if step.get("type") == "Sequence" else [step]


def _patterns(step: Mapping[str, Any]) -> list[str]:
    """What one pre-tokenizer splits at."""
    kind = step.get("type")
    if kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
        pattern = step["pattern"]
        return [pattern["Regex"] if "Regex" in pattern else re.escape(pattern["String"])]
    if kind == "Digits" and step.get("individual_digits"):
        return [r"\p{N}"]
    if kind == "ByteLevel" and not step.get("add_prefix_space"):
        return [GPT2] if step.get("use_regex", True) else []
    raise unsupported(f"pre-tokenizer {kind} with settings that are not read")


def _pieces(tokenizer: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of SentencePiece's BPE; its merges must come in the order of the ids that they make."""
    vocab = model["vocab"]
    made = [
        vocab.get("".join(merge if isinstance(merge, list) else merge.split(" "))) for merge in model.get("merges", [])
    ]
    if any(index is None for index in made) or made != sorted(made):
        raise unsupported("merges that are not in the order of the ids they make")
    steps = _normalizers(tokenizer)
    for step in steps:
        is_space = step.get("type") == "Replace" and step.get("content") == SPACE
        if not is_space and not (step.get("type") == "Prepend" and step.get("prepend") == SPACE):
            raise unsupported(f"normalizer {step.get('type')}, which is not read for pieces")
    if any(step.get("type") == "Prepend" for step in steps):
        return {"model": "llama", "add_space_prefix": True}
    scheme = _prepend_scheme(tokenizer.get("pre_tokenizer"))
    return {
        "model": "llama",
        "add_space_prefix": scheme != "never",
        "tokenizer.huggingface.prepend_scheme": scheme,
    }


def _prepend_scheme(pre_tokenizer: Any) -> str:
    """Where a pre-tokenizer puts a mark of a space: first, always or never; one that cuts at spaces finds none."""
    found = "never"
    for step in _steps(pre_tokenizer):
        if step.get("type") == "Split" and step.get("pattern") == {"String": " "}:
            continue
        found = step.get("prepend_scheme", "")
        is_known = step.get("type") == "Metaspace" and step.get("replacement") == SPACE and step.get("split") is False
        if not is_known or found not in ("first", "always", "never"):
            raise unsupported(f"pre-tokenizer {step.get('type')} with settings that are not read for pieces")
    return found


def _added_ends(tokenizer: Mapping[str, Any], tokens: list[str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Whether BOS comes first and EOS last: as tokenizer_config.json says, else as the post-processor does.

    What the post-processor puts first is BOS, whatever config.json's bos_token_id is.
    """
    told = {name: settings[name] for name in ("add_bos_token", "add_eos_token") if settings.get(name) is not None}
    if told:
        return {name: bool(told.get(name)) for name in ("add_bos_token", "add_eos_token")}
    processor = tokenizer.get("post_processor") or {}
    singles = [step.get("single") or [] for step in processor.get("processors", [processor])]
    first = next((single[0].get("SpecialToken", {}).get("id") for single in singles if single), None)
    if first not in tokens:
        return {"add_bos_token": False}
    return {"add_bos_token": True, "bos_token_id": tokens.index(first)}


def _named_ids(tokens: list[str], config: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, int]:
    """bos, eos (and up to two more ends), padding, as tokenizer_config.json spells them; else as config.json says."""

    def spelled(name: str) -> int | None:
        text = settings.get(name)
        text = text.get("content") if isinstance(text, dict) else text
        return tokens.index(text) if isinstance(text, str) and text in tokens else None

    ends = config.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    main = spelled("eos_token")
    ordered = [end for end in dict.fromkeys([main, *ends]) if end is not None]
    outside = next((end for end in ordered if not 0 <= end < len(tokens)), None)
    if outside is not None:
        raise CheckpointError(f"eos_token_id {outside} is outside the vocabulary of {len(tokens)} tokens")
    if len(ordered) > len(ENDS):
        reason = f"eos_token_id names {len(ordered)} tokens that end an answer, and at most {len(ENDS)} are read"
        raise UnsupportedFeatureError("tokenizer", [reason])
    found = dict(zip(ENDS, ordered, strict=False))
    for name in ("bos", "pad"):
        value, said = spelled(f"{name}_token"), config.get(f"{name}_token_id")
        value = said if value is None and isinstance(said, int) else value
        if value is not None:
            found[{"pad": "padding"}.get(name, name)] = value
    return {f"{name}_token_id": value for name, value in found.items() if 0 <= value < len(tokens)}


def _template(path: Path, settings: Mapping[str, Any]) -> str | None:
    """The chat template: a file of its own, or within tokenizer_config.json (the default of several)."""
    own = path / "chat_template.jinja"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = next((row.get("template") for row in template if row.get("name") == "default"), None)
    return template if isinstance(template, str) else None
