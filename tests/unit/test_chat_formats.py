"""Answers of every chat format, taken apart: the same parts however the text was cut, as models really spell them."""

import json
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pocketllm.engine.chat_formats.contract import ChatFormat, Tool, call_grammar, free_grammar, json_body
from pocketllm.engine.chat_formats.families import dsml, generic
from pocketllm.engine.chat_formats.grammar import Lark
from pocketllm.engine.chat_formats.markup import Markup, Thought, ThoughtGate
from pocketllm.engine.chat_formats.reading import CallArguments, CallBegin, Content, Part, Reasoning, joined
from pocketllm.engine.chat_formats.registry import FORMATS, format_of, thought_of
from pocketllm.engine.chat_formats.splitter import AnswerSplitter
from pocketllm.engine.lifecycle.output_text import OutputText
from pocketllm.engine.structured import constraint
from pocketllm.engine.structured.compiler import GrammarCompiler
from pocketllm.errors import ConstraintError, RequestError
from tests.byte_vocabulary import ByteTokenizer

PLAIN = GrammarCompiler(ByteTokenizer())  # type: ignore[arg-type]  # a fake
NAMED = {one.name: one for one in (*FORMATS, generic.FORMAT)}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city"],
}
TOOLS = {"weather": WEATHER, "now": {"type": "object", "properties": {}}}
OPEN = Thought("<think>", "</think>", is_open=True)
MAYBE = replace(OPEN, is_open=False)

PARIS = {"city": "Paris", "days": 2}
BAR, LOW = "\uff5c", "\u2581"


def bars(words: str) -> str:
    return f"<{BAR}{words.replace(' ', LOW)}{BAR}>"


CALLS = {
    "hermes": (
        'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>\n'
        '<tool_call>{"arguments":{},"name":"now"}</tool_call>'
    ),
    "qwen_xml": (
        "Let me see.\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
    ),
    "deepseek": (
        f"Let me see.{bars('tool calls begin')}{bars('tool call begin')}function{bars('tool sep')}weather\n```json\n"
        f'{{"city": "Paris", "days": 2}}\n```{bars("tool call end")}\n{bars("tool call begin")}function'
        f"{bars('tool sep')}now\n```json\n{{}}\n```{bars('tool call end')}{bars('tool calls end')}"
    ),
    "deepseek_v31": (
        f"Let me see.{bars('tool calls begin')}{bars('tool call begin')}weather{bars('tool sep')}"
        f'{{"city": "Paris", "days": 2}}{bars("tool call end")}{bars("tool call begin")}now{bars("tool sep")}'
        f"{{}}{bars('tool call end')}{bars('tool calls end')}"
    ),
    "deepseek_v32": (
        f'Let me see.\n\n<{dsml.MARK}function_calls>\n<{dsml.MARK}invoke name="weather">\n<{dsml.MARK}parameter '
        f'name="city" string="true">Paris</{dsml.MARK}parameter>\n<{dsml.MARK}parameter name="days" string="false">2'
        f'</{dsml.MARK}parameter>\n</{dsml.MARK}invoke>\n<{dsml.MARK}invoke name="now">\n</{dsml.MARK}invoke>\n'
        f"</{dsml.MARK}function_calls>"
    ),
    "minimax": (
        'Let me see.\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>'
    ),
    "glm": (
        "Let me see.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days"
        "</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>"
    ),
    "mistral": (
        'Let me see.[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris", "days": 2}}, '
        '{"name": "now", "arguments": {}}]'
    ),
    "mistral_named": 'Let me see.[TOOL_CALLS]weather[ARGS]{"city": "Paris", "days": 2}[TOOL_CALLS]now[ARGS]{}',
    "gemma4": (
        'Let me see.<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:2}<tool_call|><|tool_call>call:now{}<tool_call|>'
    ),
    "function_gemma": (
        "Let me see.<start_function_call>call:weather{city:<escape>Paris<escape>,days:2}<end_function_call>"
        "<start_function_call>call:now{}<end_function_call>"
    ),
    "harmony": (
        "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary to=functions.weather"
        ' <|constrain|>json<|message|>{"city": "Paris", "days": 2}<|call|><|start|>assistant to=functions.now'
        "<|channel|>commentary json<|message|>{}"
    ),
    "generic": (
        'Let me see. <tool_call>{"name": "weather", "arguments": {"city": "Paris", "days": 2}}</tool_call>'
        '<tool_call>{"name": "now"}</tool_call>'
    ),
}
CALLS["deepseek_v4"] = CALLS["deepseek_v32"].replace("function_calls", "tool_calls")
CALL = '<tool_call>\n{"name": "now", "arguments": {}}'
LLAMA = '{"name": "weather", "parameters": {"city": "Paris", "days": 2}}; {"name": "now", "parameters": {}}'


def parts_of(
    text: str, chat_format: ChatFormat, cuts: tuple[int, ...] = (), thought: Thought | None = None, **options: object
) -> list[Part]:
    """The parts of a text that comes in pieces."""
    splitter = AnswerSplitter(chat_format, thought, options.pop("tools", TOOLS), **options)  # type: ignore[arg-type]  # a stand-in, or wrong on purpose
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts: list[Part] = []
    for begin, end in pairwise(places):
        parts += splitter.push(text[begin:end])
    return joined(parts + splitter.finish())


def calls_of(parts: list[Part]) -> list[tuple[str, object]]:
    """Names and decoded arguments, which must come in order, each name before its arguments."""
    found: list[list[str]] = []
    for part in parts:
        match part:
            case CallBegin(index, name):
                assert index == len(found)
                found.append([name, ""])
            case CallArguments(index, text):
                assert index == len(found) - 1
                found[index][1] += text
    return [(name, json.loads(arguments)) for name, arguments in found]


def content_of(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Content))


@pytest.mark.parametrize("name", CALLS)
def test_two_calls_after_a_sentence_are_read_in_every_format(name: str) -> None:
    parts = parts_of(CALLS[name], NAMED[name])

    assert content_of(parts) == "Let me see."
    assert calls_of(parts) == [("weather", PARIS), ("now", {})]


def test_llama_calls_begin_the_answer_and_other_json_is_content() -> None:
    llama = NAMED["llama3"]

    assert calls_of(parts_of(LLAMA, llama)) == [("weather", PARIS), ("now", {})]
    assert calls_of(parts_of("<|python_tag|>" + LLAMA, llama)) == [("weather", PARIS), ("now", {})]
    other = '{"name": "Bob", "parameters": {"age": 3}} '
    assert parts_of(other, llama) == [Content(other)]


@pytest.mark.parametrize("name", [*CALLS, "llama3"])
@given(cuts=st.lists(st.integers(0, 600), max_size=30), length=st.integers(0, 600))
@settings(max_examples=40, deadline=None)
def test_no_cut_of_a_text_changes_what_it_is_made_of(name: str, cuts: list[int], length: int) -> None:
    # also of a text that breaks off anywhere, as one does at the token limit
    text = ("<think>hm\n</think>\n" + CALLS.get(name, LLAMA))[: max(length, 40)]
    whole = parts_of(text, NAMED[name], thought=MAYBE)

    assert parts_of(text, NAMED[name], tuple(cuts), thought=MAYBE) == whole
    assert parts_of(text, NAMED[name], tuple(range(len(text))), thought=MAYBE) == whole


MARKS = [
    "<tool_call>",
    "</tool_call>",
    "<function=",
    "<parameter=a>",
    "</function>",
    '{"name": "x"',
    "<think>",
    "</think>",
    "\n",
]
MARKS += [
    "[TOOL_CALLS]",
    "[ARGS]",
    "<arg_key>",
    "call:x{",
    '"',
    "\\",
    "{",
    "}",
    "<|tool_call>",
    "<|message|>",
    "a",
    " ",
]


def test_stop_strings_that_begin_like_marks_and_do_not_come_hide_nothing_of_a_call() -> None:
    text = "hm, hm</think>" + CALLS["hermes"]
    marks = ("</think>", "<tool_call>", '{"name"', "}\n</tool_call>")
    stops = [mark[:length] + "\0" for mark in marks for length in range(1, len(mark) + 1)]
    output = OutputText(ByteTokenizer(), stops, markup=Markup(thought=OPEN))  # type: ignore[arg-type]  # a fake
    splitter = AnswerSplitter(NAMED["hermes"], OPEN, TOOLS)
    pieces = [*(output.push(byte)[0] for byte in text.encode()), output.finish()[0]]
    parts = joined([part for piece in pieces for part in splitter.push(piece)] + splitter.finish())

    assert parts == parts_of(text, NAMED["hermes"], thought=OPEN)
    assert [name for name, _ in calls_of(parts)] == ["weather", "now"]


@pytest.mark.parametrize("name", [*CALLS, "llama3"])
@given(pieces=st.lists(st.sampled_from(MARKS), max_size=20))
@settings(max_examples=60, deadline=None)
def test_a_text_of_broken_marks_is_read_without_a_failure_and_the_same_in_pieces(name: str, pieces: list[str]) -> None:
    text = "".join(pieces)

    at_once = parts_of(text, NAMED[name], thought=MAYBE)

    assert parts_of(text, NAMED[name], tuple(range(len(text))), thought=MAYBE) == at_once


@given(text=st.text(alphabet='ab <\n{"', max_size=60))
@settings(deadline=None)
def test_a_text_without_marks_is_its_content_byte_for_byte(text: str) -> None:
    assert content_of(parts_of(text, NAMED["hermes"], (3, 5, 9))) == text


def test_a_name_is_told_before_the_arguments_are_there() -> None:
    splitter = AnswerSplitter(NAMED["hermes"], None, TOOLS)

    assert splitter.push('<tool_call>{"name": "weather", "arg') == []
    assert splitter.push('uments":') == [CallBegin(0, "weather")]
    assert splitter.push(' {"ci') == [CallArguments(0, '{"ci')]
    assert splitter.push('ty": "Pa') == [CallArguments(0, 'ty": "Pa')]
    assert splitter.push('ris"}') == [CallArguments(0, 'ris"}')]
    assert splitter.push("}</tool_call>") == splitter.finish() == []


@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_a_forced_call_that_is_cut_anywhere_leaves_no_content(chunk: int) -> None:
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    for length in range(len(text) + 1):
        parts = parts_of(text[:length], NAMED["hermes"], tuple(range(chunk, length, chunk)), is_call=True)

        assert content_of(parts) == ""
        assert bool(parts) == ('"arguments":' in text[:length]), text[:length]


@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_the_cut_closing_mark_of_a_call_is_no_content_and_what_only_looks_like_it_is(chunk: int) -> None:
    text = CALL + "\n</tool_call>"
    for length in range(len(CALL), len(text)):
        assert content_of(parts_of(text[:length], NAMED["hermes"], tuple(range(chunk, length, chunk)))).strip() == ""
    assert content_of(parts_of(CALL + "\n</tools>", NAMED["hermes"])) == "</tools>"


def test_only_the_first_call_is_kept_where_calls_may_not_be_parallel() -> None:
    assert calls_of(parts_of(CALLS["hermes"], NAMED["hermes"], allows_parallel=False)) == [("weather", PARIS)]


def test_marks_of_calls_are_text_where_no_tool_was_offered() -> None:
    assert parts_of(CALLS["hermes"], NAMED["hermes"], tools=None) == [Content(CALLS["hermes"])]


@pytest.mark.parametrize(
    "text", ["<tool_call>not json</tool_call>", '<tool_call>{"nam": 1}</tool_call> x', "<tool_call>"]
)
def test_what_is_no_call_stays_in_the_text(text: str) -> None:
    assert parts_of(text, NAMED["hermes"]) == [Content(text)]


def test_arguments_that_are_a_text_of_json_or_null_are_given_as_the_object() -> None:
    text = r'<tool_call>{"name": "now", "arguments": "{\"a\": 1}"}</tool_call>'
    none = '<tool_call>{"name": "now", "arguments": null}'

    assert calls_of(parts_of(text + none, NAMED["hermes"])) == [("now", {"a": 1}), ("now", {})]


def test_bare_values_become_json_by_the_schema_of_the_tool() -> None:
    tools = {
        "f": {
            "properties": {
                "n": {"type": "number"},
                "s": {"type": "string"},
                "b": {"type": "boolean"},
                "o": {"anyOf": [{"type": "object"}, {"type": "null"}]},
                "e": {"enum": ["1", "2"]},
            }
        }
    }
    values = {"n": "1.5", "s": "12", "b": "True", "o": "null", "e": "1", "unknown": "3"}
    text = "<function=f>" + "".join(f"<parameter={key}>\n{value}\n</parameter>" for key, value in values.items())

    [(_, found)] = calls_of(parts_of(text + "</function>", NAMED["qwen_xml"], tools=tools))

    assert found == {"n": 1.5, "s": "12", "b": True, "o": None, "e": "1", "unknown": "3"}


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "[NaN]"])
def test_a_number_that_json_cannot_say_is_kept_as_text(number: str) -> None:
    tools = {"f": {"properties": {"n": {"type": ["number", "array"]}}}}
    text = f"<function=f><parameter=n>\n{number}\n</parameter></function>"

    assert calls_of(parts_of(text, NAMED["qwen_xml"], tools=tools)) == [("f", {"n": number})]


@pytest.mark.parametrize("number", ["NaN", "-Infinity"])
def test_a_number_of_gemma_that_json_cannot_say_is_kept_as_text(number: str) -> None:
    text = f"<|tool_call>call:f{{n:{number}}}<tool_call|>"

    assert calls_of(parts_of(text, NAMED["gemma4"])) == [("f", {"n": number})]


def test_a_value_that_does_not_fit_its_schema_is_kept_as_text_and_line_ends_inside_survive() -> None:
    text = '<tool_call>weather\n<arg_key>days</arg_key><arg_value>two\n\n "x"</arg_value></tool_call>'

    assert calls_of(parts_of(text, NAMED["glm"])) == [("weather", {"days": 'two\n\n "x"'})]


def test_nested_values_of_gemma_become_json() -> None:
    text = '<|tool_call>call:f{a:{b:[1,<|"|>x, }<|"|>,{c:true}],d:null},e:-2.5}<tool_call|>'

    assert calls_of(parts_of(text, NAMED["gemma4"])) == [
        ("f", {"a": {"b": [1, "x, }", {"c": True}], "d": None}, "e": -2.5})
    ]


@pytest.mark.parametrize(
    ("thought", "text", "reasoning", "content"),
    [
        (OPEN, "hm, hm\n</think>\n\nYes.", "hm, hm", "Yes."),
        (OPEN, "<think>\nhm</think>Yes.", "hm", "Yes."),
        (OPEN, "cut off in the mid", "cut off in the mid", ""),
        (MAYBE, "\n<think>\nhm\n</think>\n\nYes. </think>", "hm", "Yes. </think>"),
        (MAYBE, "Yes. <think>no thought here</think>", "", "Yes. <think>no thought here</think>"),
        (MAYBE, "<thi", "", "<thi"),
        (None, "<think>a</think>b", "", "<think>a</think>b"),
    ],
)
def test_a_thought_is_told_apart_whoever_opened_it(
    thought: Thought | None, text: str, reasoning: str, content: str
) -> None:
    for cuts in ((), tuple(range(len(text)))):
        parts = parts_of(text, NAMED["hermes"], cuts, thought=thought)

        assert "".join(part.text for part in parts if isinstance(part, Reasoning)) == reasoning
        assert content_of(parts) == content


def test_the_analysis_of_harmony_is_thought_and_the_final_message_is_content() -> None:
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes."

    assert parts_of(text, NAMED["harmony"], tools=None) == [Reasoning("hm"), Content("Yes.")]


@given(cuts=st.lists(st.integers(0, 60), max_size=10))
@settings(deadline=None)
def test_a_gate_cuts_at_the_end_of_the_thought_however_the_text_comes(cuts: list[int]) -> None:
    text = "  <think>a STOP b</think>\nc STOP"
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    gate = ThoughtGate(MAYBE)
    pairs = [gate.push(text[begin:end]) for begin, end in pairwise(places)]

    assert "".join(thought for thought, _ in pairs) == "  <think>a STOP b</think>"
    assert "".join(rest for _, rest in pairs) + gate.flush() == "\nc STOP"


TEMPLATES = {
    "harmony": "<|start|>system<|message|>… <|channel|>final",
    "deepseek": f"{{{{ '{bars('tool calls begin')}' }}}} ```json",
    "deepseek_v31": f"{{{{ '{bars('tool calls begin')}' }}}}",
    "deepseek_v32": f'{{%- set dsml_token = "{dsml.MARK}" -%}} <{{{{ dsml_token }}}}function_calls>',
    "deepseek_v4": f'{{%- set dsml_token = "{dsml.MARK}" -%}} <{{{{ dsml_token }}}}tool_calls>',
    "minimax": "<minimax:tool_call>",
    "glm": "<tool_call>{name}<arg_key>",
    "gemma4": "<|tool_call>call:",
    "function_gemma": "<start_function_call>",
    "qwen_xml": "<tool_call>\n<function=example>",
    "mistral": "[TOOL_CALLS]",
    "mistral_named": "[TOOL_CALLS] [ARGS]",
    "hermes": "<tool_call>",
    "llama3": "<|start_header_id|> {'name': …, 'parameters': …}",
    "generic": "<|im_start|>{{ message.content }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_shows_its_format(name: str) -> None:
    assert format_of(TEMPLATES[name]).name == name


def test_a_thought_is_open_where_the_prompt_ends_with_its_mark() -> None:
    template = "…<think>…</think>…"

    assert thought_of(NAMED["hermes"], template, "<|im_start|>assistant\n<think>\n") == OPEN
    assert thought_of(NAMED["hermes"], template, "<|im_start|>assistant\n<think>\n\n</think>\n\n") == MAYBE
    assert thought_of(NAMED["hermes"], "no thoughts", "") is None


@pytest.mark.parametrize("name", NAMED)
def test_the_grammar_of_a_forced_call_takes_what_the_reader_reads_and_nothing_else(name: str) -> None:
    chat_format = NAMED[name]
    tokenizer = ByteTokenizer(chat_format.marks)
    tools = [Tool(tool, parameters) for tool, parameters in TOOLS.items()]
    source = call_grammar(chat_format, tools, Lark(tokenizer.control_ids(chat_format.marks)), allows_parallel=False)
    compiler = GrammarCompiler(tokenizer)  # type: ignore[arg-type]  # a fake
    written = []
    for seed in range(12):
        matcher = compiler.matcher(constraint.grammar(source, "tools"))
        ids = tokenizer.walk(matcher, seed, most=400)
        if matcher.is_complete:
            written.append(tokenizer.decode(ids))

    assert written
    for text in written:
        parts = parts_of(text, chat_format)
        assert len(calls_of(parts)) == 1
        assert content_of(parts).strip() == ""
        for tool, arguments in calls_of(parts):
            assert tool in TOOLS
            assert isinstance(arguments, dict)
            assert tool == "now" or isinstance(arguments["city"], str)
    refused = compiler.matcher(constraint.grammar(source, "tools"))
    assert not refused.allowed()[ord("Z")]


@pytest.mark.parametrize("are_control", [True, False])
@pytest.mark.parametrize("name", NAMED)
def test_the_grammar_of_a_free_answer_takes_any_text_and_only_true_calls(name: str, are_control: bool) -> None:
    chat_format = NAMED[name]
    tokenizer = ByteTokenizer(chat_format.marks if are_control else ())
    tools = [Tool("now", {"type": "object", "properties": {}, "additionalProperties": False})]
    source = free_grammar(chat_format, tools, Lark(tokenizer.control_ids(chat_format.marks)), allows_parallel=True)
    compiler = GrammarCompiler(tokenizer)  # type: ignore[arg-type]  # a fake

    def takes(text: str) -> bool:
        matcher = compiler.matcher(constraint.grammar(source, "tools"))
        try:
            for token_id in tokenizer.encode_rendered(text):
                matcher.accept(token_id)
            return matcher.is_complete or bool(matcher.allowed()[tokenizer.end])
        except ConstraintError:
            return False

    spelling, before = chat_format.spelling, "<|channel|>final<|message|>" if name == "harmony" else ""
    said = "" if name in ("llama3", "harmony") else "Well. "
    call = spelling.begin("now") + ("" if spelling.body is not json_body else "{}") + spelling.end
    whole = said + spelling.head + call + spelling.tail

    assert takes(before + "Nothing to call here, {not} even <b>.")
    assert takes(whole)
    assert calls_of(parts_of(whole, chat_format)) == [("now", {})]
    assert takes(said + spelling.head + call + spelling.between + call + spelling.tail)
    assert not takes(whole.replace("now", "then"))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "properties", "items", "enum", "anyOf", "required", "$defs", 'a"\n']),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(
    parameters=st.dictionaries(st.sampled_from(["properties", "required", "$defs"]), JSON),
    name=st.sampled_from([*NAMED]),
)
@settings(max_examples=150, deadline=None)
def test_schemas_that_are_none_are_refused_by_the_compiler_and_by_nothing_else(
    parameters: dict[str, object], name: str
) -> None:
    for make in (call_grammar, free_grammar):
        source = make(NAMED[name], [Tool("f", parameters)], Lark({}), allows_parallel=True)
        with suppress(RequestError):
            PLAIN.matcher(constraint.lark(source, "tools"))


def test_tools_are_told_in_the_system_message_where_a_template_has_no_place_for_them() -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "sunny"},
    ]

    told = generic.with_tools(messages, [tool])

    assert [message["role"] for message in told] == ["system", "assistant", "user"]
    assert told[0]["content"].startswith("Be brief.\n\n")
    assert json.dumps(tool["function"]) in told[0]["content"]
    assert calls_of(parts_of(told[1]["content"], generic.FORMAT)) == [("weather", {"city": "Paris"})]
    assert "sunny" in told[2]["content"]
