"""Token ids to text as they come, one at a time."""

from codecs import getincrementaldecoder
from collections.abc import Collection

from pocketllm.engine.text.tokenizer import Tokenizer

_UTF8 = getincrementaldecoder("utf-8")


class Detokenizer:
    """Turns tokens into text that can be shown at once: never half a character.

    All pushes and the flush joined are `tokenizer.decode` of the same ids with the same settings; bytes that cannot
    become a character come out as U+FFFD as soon as that is certain. `continues`: the ids continue a text, so that a
    SentencePiece vocabulary's first space is kept. An id past the vocabulary has no text: a model's head may be padded
    with rows that no token belongs to, and they can be drawn. `shown`: control tokens that are not skipped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special: bool = True,
        *,
        continues: bool = False,
        shown: Collection[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._shown = frozenset(shown)
        self._skip_special = skip_special
        self._strip = tokenizer.strips_first_space and not continues
        self._decoder = _UTF8(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is cut or the token is skipped."""
        if token_id >= self._tokenizer.vocab_size or self._is_skipped(token_id):
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if self._strip and data:
            data = data.removeprefix(b" ")
            self._strip = False
        return self._decoder.decode(data)

    def _is_skipped(self, token_id: int) -> bool:
        return self._skip_special and token_id not in self._shown and self._tokenizer.is_special(token_id)

    def flush(self) -> str:
        """What was held back: U+FFFD for a character that never came whole, or nothing."""
        return self._decoder.decode(b"", final=True)
