"""A request's text as its tokens arrive: whole characters only, and nothing past a stop string."""

from collections.abc import Sequence

from pocketllm.engine.text.detokenizer import Detokenizer
from pocketllm.engine.text.stop_strings import StopChecker
from pocketllm.engine.text.tokenizer import Tokenizer


class OutputText:
    """Joins the incremental detokenizer and the stop checker; what it returned is never taken back."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        # the answer continues the prompt's text: a first space is part of it
        self._detokenizer = Detokenizer(tokenizer, continues=True)
        self._stops = StopChecker(tuple(stops))

    def push(self, token_id: int) -> tuple[str, str | None]:
        """One more token: the text that can be shown now, and the stop string it completed, if any."""
        return self._stops.push(self._detokenizer.push(token_id))

    def finish(self) -> tuple[str, str | None]:
        """No more tokens: what was held back, and the stop string that the last characters completed, if any."""
        text, hit = self._stops.push(self._detokenizer.flush())
        return (text, hit) if hit else (text + self._stops.flush(), None)
