"""A vocabulary of single bytes, a few longer tokens and any control tokens: for grammars, which need no model."""

import random
import re
from collections.abc import Iterable, Sequence

import numpy as np

from pocketllm.engine.structured.matcher import Matcher
from pocketllm.engine.text.token_scanner import TokenScanner

WORDS = ('{"', '": ', ", ", "true", "name", "\n", "  ", '"}', "}]", "ab")


class ByteTokenizer:
    """Ids 0 to 255 are bytes, then WORDS, then the end token, then control tokens."""

    bos_token_id = None
    strips_first_space = False

    def __init__(self, control: Sequence[str] = ()) -> None:
        self._tokens = (
            [bytes([value]) for value in range(256)] + [word.encode() for word in WORDS] + [b"<|end of text|>"]
        )
        self.end = len(self._tokens) - 1
        self.eos_token_ids = frozenset({self.end})
        self._control = {text: len(self._tokens) + number for number, text in enumerate(control)}
        self._tokens += [text.encode() for text in control]
        self.vocab_size = len(self._tokens)

    def control_ids(self, texts: Iterable[str]) -> dict[str, int]:
        return {text: self._control[text] for text in texts if text in self._control}

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokens[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id >= self.end

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        return list(text.encode())

    def encode_inside(self, text: str) -> list[int]:
        """The longest tokens first."""
        pieces = re.split("(" + "|".join(map(re.escape, sorted(WORDS, key=len, reverse=True))) + ")", text)
        return [one for piece in pieces for one in ([256 + WORDS.index(piece)] if piece in WORDS else piece.encode())]

    def length(self, token_id: int) -> int:
        return len(self._tokens[token_id])

    def encode_rendered(self, text: str) -> list[int]:
        """Control tokens as themselves, everything else byte by byte."""
        pieces = TokenScanner(self._control).split(text)
        return [one for piece in pieces for one in ([piece] if isinstance(piece, int) else piece.encode())]

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(self._tokens[one] for one in ids if one != self.end).decode(errors="replace")

    def walk(self, matcher: Matcher, seed: int, most: int) -> list[int]:
        """An answer drawn from what the matcher allows, with a leaning to quotes and ends, so that it does end."""
        draw, ids = random.Random(seed), list[int]()
        weights = np.full(self.vocab_size, 1.0)
        weights[[*b'"}]<', self.end, *self._control.values()]] = 300.0
        weights[128:256] = 0.0  # no halves of characters
        while len(ids) < most and not matcher.is_complete:
            allowed = np.flatnonzero(matcher.allowed()[: self.vocab_size])
            some = weights[allowed] if weights[allowed].any() else np.ones(len(allowed))
            token_id = int(draw.choices(allowed.tolist(), some.tolist())[0])
            matcher.accept(token_id)
            ids.append(token_id)
        return ids
