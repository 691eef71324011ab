"""The `tokenizer.ggml.*` keys of a checkpoint, read once, checked against each other, and named."""

import math
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from pocketllm.engine.text.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from pocketllm.errors import CheckpointError, UnsupportedFeatureError

KINDS = ("gpt2", "llama", "gemma4")  # byte-level BPE; SentencePiece by score; SentencePiece pieces with merges
_ID_KEYS = ("bos", "eos", "eot", "eom", "unknown", "padding")
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
# Texts that end a turn or a generation in the chat formats in use; a token with such a text is a control token even
# where a converter typed it as user-defined or typed nothing.
_END_TEXTS = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|eom_id|> <|endoftext|> <|end_of_text|> <|EOT|> <end_of_turn> "
    "<EOT> _<EOT> [EOT] [EOS] <end_of_utterance> <turn|> <|flush|> <|calls|> [e~[ <eos> "
    "<\uff5cend\u2581of\u2581sentence\uff5c>"
)
END_TEXTS = frozenset(_END_TEXTS.split())


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`, one a token."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class TokenTable:
    """Tokens by id with their types; `ids` of the named tokens (bos, eos, eot, eom, unknown, padding), where known;
    `end_ids`: every token after which a model stops."""

    kind: str
    tokens: list[str]
    types: list[int]
    ids: Mapping[str, int]
    end_ids: frozenset[int]

    def texts(self, *types: TokenType) -> dict[str, int]:
        """Token texts of these types, each with its id; empty texts left out."""
        return {self.tokens[i]: i for i, kind in enumerate(self.types) if kind in types and self.tokens[i]}


@dataclass(frozen=True)
class Vocabulary(TokenTable):
    """All that encoding needs. `scores` is only for kind llama, `merges` for the others, `pre` for gpt2.

    prepend_scheme: of a directory whose space before a text is not put where there is one: `always`, or `first`, which
    is not after control tokens; None: always, and before a space too.
    """

    scores: list[float]
    merges: list[tuple[str, str]]
    pre: PreTokenizer | None
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    prepend_scheme: str | None


def read_tokens(metadata: Mapping[str, Any]) -> TokenTable:
    """The tokens in GGUF `metadata`; CheckpointError names the key that is missing or contradicts another."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None or kind in ("no_vocab", "none"):
        raise CheckpointError(
            "the checkpoint has no tokenizer (tokenizer.ggml.model in a GGUF file, tokenizer.json in a Hugging Face "
            "directory): fetch one that has, or give token ids, which Python and a server take"
        )
    if not isinstance(kind, str) or kind not in KINDS:
        reason = f"tokenizer.ggml.model is {kind!r}; this version reads {', '.join(KINDS)}"
        raise UnsupportedFeatureError("tokenizer", [reason])
    tokens = _tokens(metadata)
    types = _types(metadata, tokens, kind != "gpt2")
    defaults = {"bos": "<s>", "eos": "</s>", "unknown": "<unk>"} if kind == "llama" else {}
    found = {name: _token_id(metadata, name, tokens, defaults.get(name)) for name in _ID_KEYS}
    ids = {name: index for name, index in found.items() if index is not None}
    is_typed = bool(_array(metadata, "token_type"))
    end_ids = _end_ids(tokens, types, ids, is_typed)
    for index in (*end_ids, *([ids["bos"]] if "bos" in ids else [])):
        if types[index] == TokenType.USER_DEFINED or not is_typed:
            types[index] = TokenType.CONTROL
    return TokenTable(kind, tokens, types, ids, end_ids)


def read_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary in GGUF `metadata`; raises as `read_tokens` does."""
    table = read_tokens(metadata)
    pre = _pre_tokenizer(metadata) if table.kind == "gpt2" else None
    return Vocabulary(
        **vars(table),
        scores=_scores(metadata, len(table.tokens)) if table.kind == "llama" else [],
        merges=[] if table.kind == "llama" else _merges(metadata),
        pre=pre,
        add_bos=_flag(metadata, "add_bos_token", pre.add_bos if pre else True),
        add_eos=_flag(metadata, "add_eos_token", False),
        add_space_prefix=table.kind != "gpt2" and _flag(metadata, "add_space_prefix", table.kind == "llama"),
        prepend_scheme=metadata.get("tokenizer.huggingface.prepend_scheme"),
    )


def _array(metadata: Mapping[str, Any], name: str) -> list[Any] | None:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if value is None:
        return None
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise CheckpointError(f"tokenizer.ggml.{name} is {type(value).__name__}, expected an array")
    return value.tolist() if hasattr(value, "tolist") else list(value)


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    tokens = _array(metadata, "tokens")
    if not tokens:
        raise CheckpointError("tokenizer.ggml.tokens is missing or empty")
    _require_text(tokens, "tokens")
    if len(set(tokens)) + max(tokens.count("") - 1, 0) != len(tokens):
        counts = Counter(token for token in tokens if token)
        twice = counts.most_common(1)[0][0]
        raise CheckpointError(f"tokenizer.ggml.tokens holds {twice!r} more than once; token texts must be unique")
    return tokens


def _require_text(values: list[Any], name: str) -> None:
    if set(map(type, values)) != {str}:
        index = next(i for i, value in enumerate(values) if type(value) is not str)
        kind = type(values[index]).__name__
        raise CheckpointError(f"tokenizer.ggml.{name}[{index}] is {kind}, expected text in UTF-8")


def _numbers(metadata: Mapping[str, Any], name: str, num_tokens: int, convert: type[int] | type[float]) -> list[Any]:
    """The array as ints or floats, one a token; every element type is welcome as long as no value changes."""
    values = _array(metadata, name)
    if not values:
        return []
    if len(values) != num_tokens:
        raise CheckpointError(
            f"tokenizer.ggml.{name} has {len(values)} entries, tokenizer.ggml.tokens has {num_tokens}; they must agree"
        )
    if set(map(type, values)) == {convert}:
        return values
    for index, value in enumerate(values):
        if not isinstance(value, int | float) or not math.isfinite(value) or convert(value) != value:
            wanted = "an integer" if convert is int else "a number"
            raise CheckpointError(f"tokenizer.ggml.{name}[{index}] is {value!r}, expected {wanted}")
    return [convert(value) for value in values]


def _types(metadata: Mapping[str, Any], tokens: list[str], is_sentencepiece: bool) -> list[int]:
    types = _numbers(metadata, "token_type", len(tokens), int)
    unknown = set(types) - set(TokenType)
    if unknown:
        index = next(i for i, value in enumerate(types) if value in unknown)
        raise CheckpointError(f"tokenizer.ggml.token_type[{index}] is {types[index]}, expected 0 to {max(TokenType)}")
    is_byte = _BYTE_TOKEN.fullmatch if is_sentencepiece else (lambda token: None)
    if types:
        for index, kind in enumerate(types):
            if kind == TokenType.BYTE and is_sentencepiece and not is_byte(tokens[index]):
                raise CheckpointError(
                    f"tokenizer.ggml.tokens[{index}] is {tokens[index]!r:.60}, but its type says byte: expected <0x00> "
                    "to <0xFF>"
                )
        return list(types)
    return [TokenType.BYTE if is_byte(token) else TokenType.NORMAL for token in tokens]


def _scores(metadata: Mapping[str, Any], num_tokens: int) -> list[float]:
    scores = _numbers(metadata, "scores", num_tokens, float)
    if not scores:
        raise CheckpointError(
            "tokenizer.ggml.scores is missing or empty, but tokenizer.ggml.model llama merges by score"
        )
    if not all(map(math.isfinite, scores)):
        index = next(index for index, score in enumerate(scores) if not math.isfinite(score))
        raise CheckpointError(f"tokenizer.ggml.scores[{index}] is {scores[index]}, expected a finite number")
    return scores


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges = _array(metadata, "merges")
    if merges is None:
        raise CheckpointError(
            "tokenizer.ggml.merges is missing, but tokenizer.ggml.model needs it: only llama has none"
        )
    if merges:
        _require_text(merges, "merges")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if set(map(len, pairs)) - {2} or any(not left or not right for left, right in pairs):
        index = next(i for i, pair in enumerate(pairs) if len(pair) != 2 or not all(pair))
        raise CheckpointError(f"tokenizer.ggml.merges[{index}] is {merges[index]!r}, expected two tokens and one space")
    return pairs


def check_merges(merges: Iterable[tuple[str, str]], ids: Mapping[str, int]) -> None:
    """CheckpointError unless every merge makes one token of two; tokenizers may panic where one does not."""
    for left, right in merges:
        for text in (left, right, left + right):
            if text not in ids:
                raise CheckpointError(
                    f"tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {left!r:.60} {right!r:.60} needs "
                    f"{text!r:.60}, which is no token of the text"
                )


def _pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizer:
    splits = metadata.get("tokenizer.huggingface.splits")
    if splits is not None:  # a directory says its patterns themselves
        ignore_merges = bool(metadata.get("tokenizer.huggingface.ignore_merges"))
        return PreTokenizer(tuple(splits), ignore_merges, nfc=bool(metadata.get("tokenizer.huggingface.nfc")))
    name = metadata.get("tokenizer.ggml.pre")
    if name is None or name == "":
        warnings.warn(
            "the checkpoint does not say how to cut text into words (tokenizer.ggml.pre is absent): using 'default', "
            "which may be worse than what the model was trained with",
            stacklevel=4,
        )
        name = "default"
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise UnsupportedFeatureError("tokenizer", [f"tokenizer.ggml.pre {name!r} is not known; known: {known}"])
    return PRE_TOKENIZERS[name]


def _token_id(metadata: Mapping[str, Any], name: str, tokens: list[str], default: str | None) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is None:
        return tokens.index(default) if default in tokens else None
    if not isinstance(value, int) or not 0 <= value < len(tokens):
        raise CheckpointError(f"{key} is {value!r}, but the vocabulary has ids 0 to {len(tokens) - 1}")
    return int(value)


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if value not in (True, False):
        raise CheckpointError(f"tokenizer.ggml.{name} is {value!r}, expected true or false")
    return bool(value)


def _end_ids(tokens: list[str], types: list[int], ids: Mapping[str, int], is_typed: bool) -> frozenset[int]:
    marked = (TokenType.CONTROL, TokenType.USER_DEFINED)
    texts = {
        token: index
        for index, token in enumerate(tokens)
        if token in END_TEXTS and (types[index] in marked or not is_typed)
    }
    if {"<|call|>", "<|return|>"} <= texts.keys() or {"<|calls|>", "<|flush|>"} <= texts.keys():
        texts.pop("<|end|>", None)  # in these formats it ends a message of several, not the turn
    return frozenset(texts.values()) | {ids[name] for name in ("eos", "eot", "eom") if name in ids}
