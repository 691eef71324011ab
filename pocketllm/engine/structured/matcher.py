"""One answer's way through its grammar: which tokens may come next, and which came."""

from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pocketllm.errors import ConstraintError

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Matcher:
    """The state of one request. Not for two threads at once: `compute` may run on another while nobody else looks.

    end_token_ids: end the answer, and are allowed where the grammar lets it end; of these, late_token_ids only where
    nothing else may follow (`ignore_eos`). on_failure: called when the grammar cannot be followed any further.
    """

    def __init__(
        self,
        automaton: "LLMatcher",
        num_words: int,
        end_token_ids: Collection[int],
        late_token_ids: Collection[int] = (),
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_failure = on_failure
        self._automaton = automaton
        self._bits = np.zeros(num_words, np.uint32)
        self._end_ids = np.array(sorted(end_token_ids), np.int64)
        self._late_ids = np.array(sorted(late_token_ids), np.int64)
        self._ends = frozenset(end_token_ids)
        self._allowed: npt.NDArray[np.bool_] | None = None
        self._has_ended = False
        self.pending: Future[None] | None = None
        """Set while `compute` is under way elsewhere."""

    @property
    def is_computed(self) -> bool:
        """Whether the mask of the next token is there, or on its way."""
        return self._allowed is not None or self.pending is not None

    @property
    def is_complete(self) -> bool:
        """Whether the answer obeys its grammar and nothing can follow: it has ended."""
        return self._has_ended

    def compute(self) -> None:
        """Find which tokens may come next. Microseconds to a millisecond, without the interpreter lock."""
        bits, automaton = self._bits, self._automaton
        try:
            automaton.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        except BaseException as error:
            # a panic of the library is no Exception, and would end the thread that it comes out on
            if type(error).__module__ != "pyo3_runtime":
                raise
            raise ConstraintError("the grammar could not be followed: its library failed") from error
        allowed = np.unpackbits(bits.view(np.uint8), bitorder="little").view(np.bool_)
        # in a state of error the mask names the end tokens: what it says counts only where the grammar agrees
        may_end = automaton.is_accepting() and not automaton.is_error()
        if automaton.is_error():
            allowed[:] = False
        allowed[self._end_ids] = may_end
        if may_end and len(self._late_ids):
            allowed[self._late_ids] = False
            allowed[self._late_ids] = not allowed.any()
        self._allowed = allowed

    def allowed(self) -> npt.NDArray[np.bool_]:
        """[vocab or more] whether each token may come next. Raises ConstraintError where none may."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()
        if self._allowed is None:
            self.compute()
        assert self._allowed is not None
        if not self._allowed.any():
            raise ConstraintError(self._dead_end())
        return self._allowed

    def accept(self, token_id: int) -> None:
        """The answer has one more token, one of those that were allowed. Raises ConstraintError where it ends amiss."""
        self._allowed = None
        if token_id in self._ends:
            self._has_ended = True
            return
        automaton = self._automaton
        if not automaton.consume_token(token_id) or automaton.is_error():
            raise ConstraintError(self._dead_end())
        self._has_ended = automaton.is_stopped() and automaton.is_accepting()

    def _dead_end(self) -> str:
        self._on_failure()
        reason = self._automaton.stop_reason()
        if reason in ("ParserTooComplex", "LexerTooComplex"):
            return f"the grammar became too complex to follow ({reason}): simplify it"
        return "the grammar allows no further token, and the answer is not complete: nothing can obey it from here"
