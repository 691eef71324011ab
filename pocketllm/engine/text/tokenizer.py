"""Text to token ids and back, made from the metadata of a checkpoint alone."""

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, Protocol

from pocketllm.engine.text import protection
from pocketllm.engine.text.token_scanner import TokenScanner
from pocketllm.engine.text.vocabulary import TokenType, Vocabulary, read_vocabulary
from pocketllm.errors import RequestError

_SPECIAL = (TokenType.CONTROL, TokenType.UNKNOWN)


class _PlainModel(Protocol):
    """Encodes text in which nothing is a control token."""

    def encode(self, text: str, *, is_start: bool) -> list[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class Tokenizer:
    """Encodes and decodes; control tokens come only from templates, `parse_special`, or BOS and EOS rules.

    Text is not normalized (no NFC, whatever the original tokenizer did): the header does not carry it.
    """

    def __init__(self, vocabulary: Vocabulary, plain: _PlainModel) -> None:
        self._vocabulary = vocabulary
        self._plain = plain
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """The tokenizer of a GGUF header.

        CheckpointError names a key that is missing or wrong, UnsupportedFeatureError a kind that is not known.
        """
        from pocketllm.engine.text.byte_bpe import ByteBPE
        from pocketllm.engine.text.sentencepiece_bpe import SentencePieceBPE

        vocabulary = read_vocabulary(metadata)
        plain = ByteBPE(vocabulary) if vocabulary.kind == "gpt2" else SentencePieceBPE(vocabulary)
        return cls(vocabulary, plain)

    @property
    def vocab_size(self) -> int:
        return len(self._vocabulary.tokens)

    @property
    def bos_token_id(self) -> int | None:
        return self._vocabulary.ids.get("bos")

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every token after which the model stops: end of sequence, of turn, of message."""
        return self._vocabulary.end_ids

    def is_special(self, token_id: int) -> bool:
        """True for control tokens and the unknown token: not part of a text."""
        return self._vocabulary.types[self._checked(token_id)] in _SPECIAL

    def control_ids(self, texts: Iterable[str]) -> dict[str, int]:
        """Those of some texts that are control tokens, with their ids."""
        return {text: self._control_ids[text] for text in texts if text in self._control_ids}

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Ids of `text`, with BOS and EOS where the checkpoint wants them and `add_special` allows it.

        The text of a control token is plain text unless `parse_special`; BOS is never doubled.
        """
        _check_unicode(text)
        pieces = self._special.split(text) if parse_special else [text] if text else []
        ids = self._encode_pieces(pieces)
        if not add_special:
            return ids
        eos = self._vocabulary.ids.get("eos")
        add_eos = self._vocabulary.add_eos and eos is not None and ids[-1:] != [eos]
        return self._with_bos(ids) + ([eos] if add_eos and eos is not None else [])

    def encode_inside(self, text: str) -> list[int]:
        """Ids of a text that continues another: nothing is added, not even a first space."""
        _check_unicode(text)
        return self._plain.encode(text, is_start=False) if text else []

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of a rendered chat template: control tokens are parsed, except where `ChatTemplate.render` protected
        the text of a message; BOS is added only where the checkpoint wants it and the template did not write it."""
        _check_unicode(text)
        pieces = (
            piece if isinstance(piece, int) else protection.unprotect(piece) for piece in self._special.split(text)
        )
        return self._with_bos(self._encode_pieces(pieces))

    def token_text(self, token_id: int) -> str:
        """The text of one token, for people: a byte sequence that is not UTF-8 shows U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes that one token stands for (a control token: those of its spelling)."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._plain.token_bytes(self._checked(token_id))
        return known

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, continues: bool = False) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD.

        A SentencePiece vocabulary that prefixes a space when it encodes drops it here, unless the ids continue a text.
        """
        kept = (token_id for token_id in ids if not (skip_special and self.is_special(token_id)))
        data = b"".join(map(self.token_bytes, kept))
        if self.strips_first_space and not continues:
            data = data.removeprefix(b" ")
        return data.decode(errors="replace")

    @property
    def strips_first_space(self) -> bool:
        """True where encoding puts a space before a text, so that decoding takes it away."""
        return self._vocabulary.add_space_prefix

    @cached_property
    def _control_ids(self) -> dict[str, int]:
        return self._vocabulary.texts(*_SPECIAL)

    @cached_property
    def _special(self) -> TokenScanner:
        return TokenScanner(self._control_ids)

    def _encode_pieces(self, pieces: Iterable[str | int]) -> list[int]:
        ids: list[int] = []
        is_start = True
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += self._plain.encode(piece, is_start=is_start)
            is_start = isinstance(piece, int) and self._vocabulary.prepend_scheme != "first"
        return ids

    def _with_bos(self, ids: list[int]) -> list[int]:
        bos = self._vocabulary.ids.get("bos")
        if bos is None or not self._vocabulary.add_bos or ids[:1] == [bos]:
            return ids
        return [bos, *ids]

    def _checked(self, token_id: int) -> int:
        if not 0 <= token_id < self.vocab_size:
            raise RequestError(f"token id {token_id} is not in the vocabulary (0 to {self.vocab_size - 1})")
        return token_id


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise RequestError(
            f"the text holds a lone surrogate U+{code:04X} at character {error.start}, which is not valid Unicode"
        ) from error
