"""The form of a chat answer: a grammar waits for the thought, in every way that a template and a vocabulary mark it."""

from types import SimpleNamespace
from typing import Any

import pytest

from pocketllm.engine.serving.answers.form import ChatForm, chat_form, held_after_thought
from pocketllm.engine.serving.answers.structured import StructuredFields, may_compile
from pocketllm.engine.serving.answers.tools import ToolFields, offered
from pocketllm.engine.structured import constraint
from pocketllm.engine.structured.compiler import GrammarCompiler
from pocketllm.errors import ConstraintError, RequestError
from tests.byte_vocabulary import ByteTokenizer

THINKS = "… <tool_call> … <think> … </think>"
HARMONY = "<|start|>assistant<|channel|>final<|message|>"
MARKS = ("<think>", "</think>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>")
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
FORMAT = {"type": "json_object", "schema": {"type": "boolean"}}


def form_of(source: str, prompt: str, tokenizer: ByteTokenizer, **fields: Any) -> ChatForm:
    body, tools = (
        StructuredFields(**{k: v for k, v in fields.items() if k == "response_format"}),
        ToolFields(**{k: v for k, v in fields.items() if k != "response_format"}),
    )
    return chat_form(body, offered(tools), SimpleNamespace(source=source), prompt, tokenizer)  # type: ignore[arg-type]  # a stand-in, or wrong on purpose


def takes(form: ChatForm, tokenizer: ByteTokenizer, text: str) -> bool:
    assert form.constraint is not None
    matcher = GrammarCompiler(tokenizer).matcher(form.constraint)  # type: ignore[arg-type]  # a fake
    try:
        for token_id in tokenizer.encode_rendered(text):
            matcher.accept(token_id)
        return matcher.is_complete or bool(matcher.allowed()[tokenizer.end])
    except ConstraintError:
        return False


@pytest.mark.parametrize("control", [MARKS, ()], ids=["control tokens", "plain text"])
@pytest.mark.parametrize(
    ("prompt", "valid", "invalid"),
    [
        ("<think>\n", ["hm, {\n</think>\n\ntrue", "</think>false"], ["true", "hm</think>maybe", "hm"]),
        ("", ["true", "<think>\nhm\n</think>\n\ntrue", "\n<think></think>false"], ["hm</think>true", "<think>true"]),
        ("<think>\n\n</think>\n\n", ["true"], ["hm"]),
    ],
)
def test_a_grammar_holds_what_follows_the_thought(
    control: tuple[str, ...], prompt: str, valid: list[str], invalid: list[str]
) -> None:
    tokenizer = ByteTokenizer(control)
    form = form_of(THINKS, f"<|im_start|>assistant\n{prompt}", tokenizer, response_format=FORMAT)

    assert [text for text in valid if not takes(form, tokenizer, text)] == []
    assert [text for text in invalid if takes(form, tokenizer, text)] == []


def test_a_forced_call_may_be_thought_about_first() -> None:
    tokenizer = ByteTokenizer(("</think>",))
    form = form_of(THINKS, "…<think>\n", tokenizer, tools=[TOOL], tool_choice="required")
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'

    assert takes(form, tokenizer, f"Which one?\n</think>\n\n{call}")
    assert not takes(form, tokenizer, call)
    assert not takes(form, tokenizer, "Which one?\n</think>\n\nNone.")


def test_a_grammar_holds_the_final_message_of_harmony_and_a_forced_call_stands_in_its_place() -> None:
    tokenizer = ByteTokenizer(MARKS)
    analysis = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    held = form_of(HARMONY, "<|start|>assistant", tokenizer, response_format=FORMAT)
    forced = form_of(HARMONY, "<|start|>assistant", tokenizer, tools=[TOOL], tool_choice="required")
    call = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"

    for before in ("", analysis):
        assert takes(held, tokenizer, f"{before}<|channel|>final<|message|>true")
        assert takes(forced, tokenizer, before + call)
    assert not takes(held, tokenizer, "true")
    assert not takes(forced, tokenizer, f"{analysis}<|channel|>final<|message|>No.")
    with pytest.raises(RequestError, match="cannot be combined"):
        form_of(HARMONY, "", tokenizer, response_format=FORMAT, tools=[TOOL])


def test_marks_that_are_control_tokens_stay_in_the_text_where_it_is_taken_apart() -> None:
    tokenizer = ByteTokenizer(("<think>", "<tool_call>", "<other>"))
    thinking = form_of(THINKS, "", tokenizer)
    plain = form_of("no marks at all", "", tokenizer)

    assert thinking.markup.shown_token_ids == (tokenizer.control_ids(["<think>"])["<think>"], tokenizer.vocab_size - 2)
    assert (plain.is_split, plain.markup.shown_token_ids, plain.constraint) == (False, (), None)


def test_the_command_line_holds_an_answer_as_the_server_does() -> None:
    tokenizer = ByteTokenizer()
    template: Any = SimpleNamespace(source=THINKS)
    served = form_of(THINKS, "<think>", tokenizer, response_format=FORMAT)
    held = held_after_thought(constraint.json_schema({"type": "boolean"}), template, "<think>", tokenizer)  # type: ignore[arg-type]  # a stand-in, or wrong on purpose

    assert held == served.constraint


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"messages": []}, False),
        ({"tools": [], "tool_choice": "auto"}, False),
        ({"tool_choice": "required"}, True),
        ({"guided_regex": "a"}, True),
        ({"response_format": None, "grammar": None}, False),
        ({"text": {"format": {}}}, True),
    ],
)
def test_only_bodies_that_may_hold_a_grammar_are_read_aside(document: dict[str, Any], expected: bool) -> None:
    assert may_compile(document) is expected
