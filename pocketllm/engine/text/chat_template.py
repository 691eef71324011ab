"""Renders conversations with the chat template of a checkpoint, the way transformers does."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from hashlib import sha256
from typing import Any

from pocketllm.engine.text import messages as message_rules
from pocketllm.engine.text.protection import protect
from pocketllm.engine.text.token_scanner import TokenScanner
from pocketllm.engine.text.vocabulary import TokenType, read_tokens
from pocketllm.errors import CheckpointError, RequestError

STAND_IN = "\ufdd1the text to be continued\ufdd1"
"""Stands for a message's text while a template is rendered; U+FDD1 is a noncharacter, which no text should hold."""


class ChatTemplate:
    """One template, compiled once; rendering is safe in any thread.

    `special_texts`: what the template sees, such as bos_token; `control_texts`: spellings that must not come from a
    message; `now`: the clock behind `strftime_now`.
    """

    def __init__(
        self,
        source: str,
        special_texts: Mapping[str, str],
        control_texts: Mapping[str, int],
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        from jinja2 import TemplateError

        from pocketllm.engine.text.sandbox import make_environment

        self.source = source
        self._special_texts = dict(special_texts)
        self._control = TokenScanner(control_texts)
        try:
            self._template = make_environment(now).from_string(source)
        except (TemplateError, RecursionError) as error:
            line = f" in line {number}" if (number := getattr(error, "lineno", None)) else ""
            raise CheckpointError(f"tokenizer.chat_template cannot be compiled{line}: {error}") from error

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> "ChatTemplate | None":
        """The template of a GGUF header, None where it has none; CheckpointError where it cannot be compiled."""
        source = metadata.get("tokenizer.chat_template")
        if source is None:
            return None
        if not isinstance(source, str):
            raise CheckpointError(f"tokenizer.chat_template is {type(source).__name__}, expected text")
        table = read_tokens(metadata)
        names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        texts = {key: table.tokens[table.ids[name]] for key, name in names.items() if name in table.ids}
        return cls(source, texts, table.texts(TokenType.CONTROL, TokenType.UNKNOWN))

    @property
    def sha256(self) -> str:
        return sha256(self.source.encode(errors="surrogatepass")).hexdigest()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt of a conversation, for `Tokenizer.encode_rendered`.

        Control-token spellings inside messages and tools carry marks (see `protection`); without any, the text is
        exactly what the template makes. RequestError carries the template's own message, or says what went wrong.
        """
        variables = {
            **self._special_texts,
            "tools": self._protected(tools),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **{name: self._protected(value) for name, value in kwargs.items()},
        }
        try:
            return self._run(variables, messages, arguments_as_text=False)
        except TypeError as error:
            # some templates concatenate the arguments of a tool call: they were written for JSON text
            if any(message.get("tool_calls") for message in messages):
                try:
                    return self._run(variables, messages, arguments_as_text=True)
                except TypeError:
                    pass
            raise _failed(error) from error

    def render_continued(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
        """The prompt of a conversation whose last message is to be continued: it ends in exactly that message's text.

        Arguments and errors are `render`'s; RequestError too where the last message is not the assistant's, or where
        the template does not write its text as it stands.
        """
        messages = [dict(message) for message in messages]
        if not messages or messages[-1].get("role") != "assistant" or messages[-1].get("tool_calls"):
            raise RequestError(
                "continue_final_message needs a last message of the assistant, with content and without tool calls",
                param="messages",
            )
        [last] = message_rules.normalize(messages[-1:])
        # a stand-in shows where the text goes, whatever the template trims from it or writes after it
        text = self.render(
            [*messages[:-1], {**messages[-1], "content": STAND_IN}], add_generation_prompt=False, **kwargs
        )
        before, *after = text.split(STAND_IN)
        if len(after) != 1:
            raise RequestError(
                "the checkpoint's chat template does not let a last message be continued", param="messages"
            )
        return before + str(self._protected(last["content"]))

    def _run(
        self, variables: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], *, arguments_as_text: bool
    ) -> str:
        from jinja2 import TemplateError

        from pocketllm.engine.text import sandbox

        normal = message_rules.normalize(messages, arguments_as_text=arguments_as_text)
        try:
            return sandbox.run(self._template, {**variables, "messages": self._protected(normal)})
        except sandbox.TemplateMessageError as error:
            raise RequestError(str(error), param="messages") from error
        except sandbox.TemplateLimitError as error:
            raise RequestError(f"the checkpoint's chat template was stopped: {error}") from error
        except (
            TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            MemoryError,
            RecursionError,
            ValueError,
        ) as error:
            raise _failed(error) from error

    def _protected(self, value: Any) -> Any:
        if isinstance(value, str):
            return protect(value, self._control)
        if isinstance(value, Mapping):
            return {self._protected(key): self._protected(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._protected(item) for item in value]
        return value


def _failed(error: Exception) -> RequestError:
    detail = str(error) or type(error).__name__
    return RequestError(f"the checkpoint's chat template cannot render these messages: {detail}", param="messages")
