"""Compiles constraints over one tokenizer's vocabulary, within bounds, and keeps what it compiled."""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from pocketllm.engine.structured.constraint import INVALID_GRAMMAR, Constraint
from pocketllm.engine.structured.matcher import Matcher
from pocketllm.engine.text.tokenizer import Tokenizer
from pocketllm.errors import ConstraintError, RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

log = logging.getLogger(__name__)

MAX_KEPT = 64
"""Compiled constraints that are kept, the last used ones."""
MAX_COPIES = 1024
"""Matchers made of one compiled constraint: copies share a lexer, whose states only grow."""
LEXER_FUEL = 200_000
"""llguidance's budget for the regular expressions of a grammar, about 60 ms; its own default is 1,000,000."""
MAX_COMPILE_S = 2.0
"""A constraint that took longer is refused; llguidance's own budgets end one soon after."""
MAX_REASON = 300
MAX_FORCED = 256
"""Bytes of a forced text that are cut into tokens at once: a grammar can force megabytes, and at every token anew."""


class Vocabulary:
    """A tokenizer's vocabulary as llguidance takes it, read when it is first asked for; safe in any thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._reading = threading.Lock()
        self._read: LLTokenizer | None = None

    def read(self) -> "LLTokenizer":
        """The vocabulary."""
        from llguidance import LLTokenizer, TokenizerWrapper

        with self._reading:
            if self._read is None:
                # `eos_token`: all of them, or the others would be taken for text
                ends = sorted(self._tokenizer.eos_token_ids)
                self._read = LLTokenizer(TokenizerWrapper(TokenTable(self._tokenizer)), eos_token=ends or None)
            return self._read


class GrammarCompiler:
    """From a Constraint to a Matcher; safe in any thread.

    vocabulary: the tokenizer's, where others read it too. listeners: told the seconds of each compilation that
    succeeded.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary | None = None) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary or Vocabulary(tokenizer)
        self._lock = threading.Lock()  # guards _kept
        self._kept: OrderedDict[Constraint, _Compiled] = OrderedDict()
        self.listeners: list[Callable[[float], None]] = []

    def matcher(
        self, constraint: Constraint, stop_token_ids: Collection[int] = (), ignore_eos: bool = False
    ) -> Matcher:
        """A fresh Matcher. Raises RequestError, in a sentence that names the field, for what cannot be compiled."""
        with self._lock:
            compiled = self._kept.get(constraint)
        if compiled is None:
            compiled = self._compile(constraint)
        with self._lock:
            self._kept[constraint] = compiled
            self._kept.move_to_end(constraint)
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
            copy = compiled.copy()
            if compiled.num_copies >= MAX_COPIES:
                del self._kept[constraint]
        ends = self._tokenizer.eos_token_ids
        return Matcher(
            copy,
            self._num_words,
            {*ends, *stop_token_ids},
            ends if ignore_eos else (),
            lambda: self._forget(constraint),
        )

    def _forget(self, constraint: Constraint) -> None:
        """A copy ran out of its budget: the next request compiles anew, rather than inherit a spent lexer."""
        with self._lock:
            self._kept.pop(constraint, None)

    @property
    def _num_words(self) -> int:
        return -(-self._tokenizer.vocab_size // 32)

    def _compile(self, constraint: Constraint) -> "_Compiled":
        from llguidance import LLMatcher, LLParserLimits

        vocabulary = self._vocabulary.read()
        start_s = time.thread_time()  # this thread's own: a machine that is busy with others refuses no grammar
        limits = LLParserLimits(initial_lexer_fuel=LEXER_FUEL, verbose_errors=False)
        automaton = LLMatcher(vocabulary, constraint.grammar, log_level=0, limits=limits)
        self._check(automaton, constraint)
        for _ in range(2):  # what spends the shared lexer's budget shows in the second copy
            self._check_first_mask(automaton.deep_copy(), constraint)
        took_s = time.thread_time() - start_s
        if took_s > MAX_COMPILE_S:
            raise refusal(constraint, f"it took {took_s:.1f} s, the limit is {MAX_COMPILE_S:g} s: simplify it")
        for listener in self.listeners:
            listener(took_s)
        return _Compiled(automaton)

    def _check_first_mask(self, automaton: "LLMatcher", constraint: Constraint) -> None:
        """The first mask is where what is too large, or matches nothing, comes out."""
        ends = self._tokenizer.eos_token_ids
        try:
            allowed = Matcher(automaton, self._num_words, ends).allowed()
        except ConstraintError as error:
            if not automaton.get_error().startswith("NoExtension"):
                self._check(automaton, constraint)
            raise refusal(constraint, "it matches no text that this vocabulary can spell") from error
        if allowed.sum() == allowed[sorted(ends)].sum():
            raise refusal(constraint, "it matches nothing but the empty text")

    def _check(self, automaton: "LLMatcher", constraint: Constraint) -> None:
        # errors are a state here, not an exception
        if automaton.is_error():
            raise refusal(constraint, automaton.get_error())


@dataclass
class _Compiled:
    automaton: "LLMatcher"
    num_copies: int = 0

    def copy(self) -> "LLMatcher":
        self.num_copies += 1
        return self.automaton.deep_copy()


class TokenTable:
    """A vocabulary in the words of llguidance, which asks how a text that a grammar forces is spelled.

    Only that spelling is allowed then: the one that the model has learned, of the many that give the same bytes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        ids = range(tokenizer.vocab_size)
        ends = sorted(tokenizer.eos_token_ids)
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in ids]
        self.special_token_ids = [token_id for token_id in ids if tokenizer.is_special(token_id)]
        self.eos_token_id = ends[0] if ends else 0
        self.bos_token_id = tokenizer.bos_token_id

    def __call__(self, text: bytes | str) -> list[int]:
        """Ids of a text; those of its bytes, the longest first, where the tokenizer would change it."""
        data = beginning(text.encode() if isinstance(text, str) else text)
        with suppress(Exception):  # half a character, or a text that the tokenizer refuses: nothing may be raised here
            ids = self._tokenizer.encode_inside(data.decode())
            if b"".join(self.tokens[one] for one in ids) == data:
                return ids
        return self._spelled(data)

    def _spelled(self, data: bytes) -> list[int]:
        ids, place = list[int](), 0
        while place < len(data):
            ends = range(min(len(data), place + self._longest), place, -1)
            end = next((end for end in ends if data[place:end] in self._by_bytes), None)
            if end is None:
                break
            ids.append(self._by_bytes[data[place:end]])
            place = end
        return ids

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        special = set(self.special_token_ids)
        return {data: one for one, data in enumerate(self.tokens) if data and one not in special}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._by_bytes))


def beginning(data: bytes) -> bytes:
    """The first MAX_FORCED bytes, without the half of a character."""
    end = min(MAX_FORCED, len(data))
    while end < len(data) and data[end] & 0xC0 == 0x80:
        end -= 1
    return data[:end]


def refusal(constraint: Constraint, reason: str) -> RequestError:
    """One sentence about a constraint that cannot be honored."""
    # what follows the first lines quotes the grammar, with marks under it
    lines = [line.strip() for line in reason.replace("<non-verbose/>", "").splitlines() if line.strip()]
    told = next(
        (line.removeprefix("error: ") for line in lines if line.startswith("error:")), lines[0] if lines else "?"
    )
    if told.startswith("panic"):
        log.error("llguidance failed on a %s: %s", constraint.kind, reason)
        told = "the compiler failed on it; the log says how"
    if "coerce_one_of" in told:
        told = "the branches of a oneOf overlap, which is not supported: use anyOf"
    told = told if len(told) <= MAX_REASON else told[:MAX_REASON] + "…"
    return RequestError(
        f"{constraint.param}: the {constraint.kind} cannot be compiled: {told}",
        param=constraint.param,
        code=INVALID_GRAMMAR,
    )
