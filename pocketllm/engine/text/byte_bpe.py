"""The `gpt2` kind: byte-level BPE with a table of merges."""

import warnings
from typing import Any

from pocketllm.engine.text.token_scanner import TokenScanner
from pocketllm.engine.text.vocabulary import TokenType, Vocabulary, check_merges
from pocketllm.errors import CheckpointError

_RAW = (TokenType.CONTROL, TokenType.USER_DEFINED)


def _alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in token texts (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class ByteBPE:
    """Encodes plain text to ids; control tokens cannot come out, user-defined ones always match."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._byte_of = _alphabet()
        self._user_defined = TokenScanner(vocabulary.texts(TokenType.USER_DEFINED))
        self._model = _build(vocabulary)
        known = set(vocabulary.tokens)
        self._missing = {byte for char, byte in self._byte_of.items() if char not in known}

    def encode(self, text: str, *, is_start: bool) -> list[int]:
        """Ids of `text`; `is_start` has no meaning for this kind.

        A byte without a token (SmolLM2 lacks a few that text rarely holds) is left out, as every implementation of
        this kind does, with a warning.
        """
        if self._missing and (lost := self._missing.intersection(text.encode())):
            names = ", ".join(f"0x{byte:02X}" for byte in sorted(lost))
            warnings.warn(f"the vocabulary has no token for byte {names}: it is missing from the prompt", stacklevel=4)
        ids: list[int] = []
        for piece in self._user_defined.split(text):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += self._model.encode(piece, add_special_tokens=False).ids
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; tokens with characters outside the byte alphabet stand for their text."""
        text = self._vocabulary.tokens[token_id]
        if self._vocabulary.types[token_id] not in _RAW:
            try:
                return bytes(map(self._byte_of.__getitem__, text))
            except KeyError:
                pass
        return text.encode()


def _build(vocabulary: Vocabulary) -> Any:
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    assert vocabulary.pre is not None
    merged = {left + right for left, right in vocabulary.merges}
    ids = {
        token: index
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        # a token that merging cannot reach is left out where plain text must not become it
        if token and (kind not in _RAW or token in merged)
    }
    check_merges(vocabulary.merges, ids)
    try:
        bpe = models.BPE(vocab=ids, merges=vocabulary.merges, ignore_merges=vocabulary.pre.ignore_merges)
    except Exception as error:  # tokenizers raises no narrower class
        raise CheckpointError(f"tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {error}") from error
    tokenizer = Tokenizer(bpe)
    if vocabulary.pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in vocabulary.pre.splits]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    return tokenizer
