"""A request's text as its tokens arrive: whole characters only, and nothing past a stop string."""

from collections.abc import Sequence

from pocketllm.engine.chat_formats.markup import Markup, ThoughtGate
from pocketllm.engine.text.detokenizer import Detokenizer
from pocketllm.engine.text.stop_strings import StopChecker
from pocketllm.engine.text.tokenizer import Tokenizer


class OutputText:
    """Joins the incremental detokenizer and the stop checker; what it returned is never taken back."""

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str], with_stop: bool = False, markup: Markup | None = None
    ) -> None:
        """with_stop: the text keeps what ended it, stop string or stop token; inside the markup's thought none does."""
        markup = markup or Markup()
        # the answer continues the prompt's text: a first space is part of it
        self._detokenizer = Detokenizer(tokenizer, continues=True, shown=markup.shown_token_ids)
        self._gate = ThoughtGate(markup.thought)
        self._stops = StopChecker(tuple(stops))
        self._with_stop = with_stop

    def push(self, token_id: int, may_stop: bool = True) -> tuple[str, str | None]:
        """One more token: the text that can be shown now, and the stop string it completed, if any.

        A stop string begins after the tokens that may not stop.
        """
        thought, text = self._gate.push(self._detokenizer.push(token_id))
        passed, hit = self._shown(*self._stops.push(text)) if may_stop else (text, None)
        return thought + passed, hit

    def push_last(self, token_id: int) -> tuple[str, None]:
        """A stop token, after which nothing comes: its text, where it is to be shown."""
        return self._detokenizer.push(token_id) if self._with_stop else "", None

    def finish(self) -> tuple[str, str | None]:
        """No more tokens: what was held back, and the stop string that the last characters completed, if any."""
        thought, text = self._gate.push(self._detokenizer.flush())
        passed, hit = self._shown(*self._stops.push(text + self._gate.flush()))
        return thought + passed + ("" if hit else self._stops.flush()), hit

    def _shown(self, text: str, hit: str | None) -> tuple[str, str | None]:
        return (text + hit if hit and self._with_stop else text), hit
