"""Prompts of a checkpoint without its weights: its tokenizer and its chat template, from the header alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pocketllm.errors import RecordError
from pocketllm.golden.fixture import Case

if TYPE_CHECKING:
    from pocketllm.engine.text.chat_template import ChatTemplate
    from pocketllm.engine.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Prompts:
    """The text side of a checkpoint, made when it is first asked."""

    metadata: Mapping[str, Any]

    @cached_property
    def tokenizer(self) -> "Tokenizer":
        from pocketllm.engine.text.tokenizer import Tokenizer

        return Tokenizer.from_metadata(self.metadata)

    @cached_property
    def template(self) -> "ChatTemplate | None":
        from pocketllm.engine.text.chat_template import ChatTemplate

        return ChatTemplate.from_metadata(self.metadata)

    def render(self, case: Case) -> str:
        """The text that is tokenized: the rendered template, or the prompt itself; RecordError without a template."""
        if case.kind == "completion":
            return case.prompt
        if self.template is None:
            raise RecordError(f"case {case.name}: the checkpoint has no chat template, so it answers no chat")
        return self.template.render([dict(message) for message in case.messages])

    def token_ids(self, case: Case) -> tuple[int, ...]:
        """The prompt ids that a case must become."""
        return self._encode(case, self.render(case))

    def other_template_ids(self, case: Case) -> tuple[int, ...]:
        """The ids under a template, or with a prompt, that begins with one more space."""
        return self._encode(case, " " + self.render(case))

    def _encode(self, case: Case, text: str) -> tuple[int, ...]:
        tokenizer = self.tokenizer
        return tuple(tokenizer.encode_rendered(text) if case.kind == "chat" else tokenizer.encode(text))

    def token_text(self, token_id: int) -> str:
        """The text of a token for people, also of an id that is none."""
        is_token = 0 <= token_id < self.tokenizer.vocab_size
        return self.tokenizer.token_text(token_id) if is_token else "outside the vocabulary"
