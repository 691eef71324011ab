"""GLM 4.5 and later: a name, then <arg_key> and <arg_value> pairs, between <tool_call> and </tool_call>."""

import json

from pocketllm.engine.chat_formats.contract import ChatFormat, Spelling, Tool
from pocketllm.engine.chat_formats.elements_grammar import elements_body
from pocketllm.engine.chat_formats.grammar import Lark
from pocketllm.engine.chat_formats.reading import Reader, Steps
from pocketllm.engine.chat_formats.xml_call import json_value, parameter

BEGIN, END = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


def read(reader: Reader) -> Steps[None]:
    """Calls between marks."""
    while (yield from reader.until((BEGIN,), reader.content)) is not None:
        yield from reader.skip_blanks()
        name, mark = yield from reader.text_until(("\n", KEY, END))
        if mark is None or not name.strip():
            reader.content(BEGIN + name + (mark or ""))
            continue
        yield from read_arguments(reader, name.strip(), mark)


def read_arguments(reader: Reader, name: str, mark: str | None) -> Steps[None]:
    """Pairs up to the end of the call; each is told when it is whole."""
    reader.begin_call(name)
    reader.arguments("{")
    schema, is_first = reader.tools.get(name, {}), True
    if mark == "\n":
        mark = yield from reader.until((KEY, END), lambda text: None)
    while mark == KEY:
        key, _ = yield from reader.text_until((KEY_END,))
        yield from reader.until((VALUE,), lambda text: None)
        value, mark = yield from reader.text_until((VALUE_END,))
        if mark is None:
            return
        told = json_value(value, parameter(schema, key.strip()), None)
        reader.arguments(f"{'' if is_first else ', '}{json.dumps(key.strip(), ensure_ascii=False)}: {told}")
        is_first = False
        mark = yield from reader.until((KEY, END), lambda text: None)
    if mark == END:
        reader.arguments("}")


def body(lark: Lark, tool: Tool) -> str:
    """The pairs, one a line each."""
    return elements_body(lark, tool, lambda key: f"{KEY}{key}{KEY_END}\n{VALUE}", f"{VALUE_END}\n")


FORMAT = ChatFormat(
    name="glm",
    signs=(KEY,),
    read=read,
    spelling=Spelling(lambda name: f"{BEGIN}{name}\n", END, body, trigger=BEGIN),
    marks=(BEGIN, END, KEY, KEY_END, VALUE, VALUE_END),
)
