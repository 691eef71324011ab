"""Which format a chat template is of."""

from dataclasses import replace

from pocketllm.engine.chat_formats.contract import ChatFormat
from pocketllm.engine.chat_formats.families import (
    deepseek,
    dsml,
    gemma,
    generic,
    glm,
    harmony,
    hermes,
    llama3,
    minimax,
    mistral,
    qwen_xml,
)
from pocketllm.engine.chat_formats.markup import Thought

# in this order: what is more particular comes first, for marks such as <tool_call> belong to several
FORMATS: tuple[ChatFormat, ...] = (
    harmony.FORMAT,
    dsml.FORMAT,
    dsml.FORMAT_V4,
    deepseek.FORMAT,
    deepseek.FORMAT_V31,
    minimax.FORMAT,
    glm.FORMAT,
    gemma.FORMAT,
    gemma.FUNCTION_GEMMA,
    qwen_xml.FORMAT,
    mistral.FORMAT_NAMED,
    mistral.FORMAT,
    hermes.FORMAT,
    llama3.FORMAT,
)


def format_of(template: str) -> ChatFormat:
    """The format that a chat template's text shows; `generic` where it shows none."""
    found = (one for one in FORMATS if all(sign in template for sign in one.signs))
    return next(found, generic.FORMAT)


def thought_of(chat_format: ChatFormat, template: str, prompt: str) -> Thought | None:
    """How the answer to a rendered prompt may begin with a thought; None where the template knows of none."""
    for thought in chat_format.thoughts:
        if thought.end in template or chat_format.reads_thought:
            is_open = thought.is_open or prompt.rstrip().endswith(thought.begin)
            return replace(thought, is_open=is_open)
    return None
