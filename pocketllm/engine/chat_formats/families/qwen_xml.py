"""Qwen3-Coder and later Qwens: <function=NAME> with a <parameter=KEY> element for each argument."""

from pocketllm.engine.chat_formats.contract import ChatFormat, Spelling, Tool
from pocketllm.engine.chat_formats.elements_grammar import elements_body
from pocketllm.engine.chat_formats.grammar import Lark
from pocketllm.engine.chat_formats.reading import Reader, Steps
from pocketllm.engine.chat_formats.xml_call import Elements, element_arguments

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION = "<function="
ELEMENTS = Elements("<parameter=", ">", "</parameter>", "</function>")


def read(reader: Reader) -> Steps[None]:
    """Functions between marks; some answers leave the outer mark out."""
    while (mark := (yield from reader.until((BEGIN, FUNCTION), reader.content))) is not None:
        if mark == BEGIN:
            place = reader.mark()
            yield from reader.skip_blanks()
            is_call = yield from reader.takes(FUNCTION)
            if not is_call:
                reader.rewind(place)
            reader.forget()
            if not is_call:
                reader.content(BEGIN)
                continue
        name, closing = yield from reader.text_until((">", "\n"))
        if closing != ">" or not name.strip():
            reader.content(FUNCTION + name + (closing or ""))
            continue
        yield from element_arguments(reader, name.strip(), ELEMENTS)
        yield from reader.skip_blanks()
        yield from reader.takes(END)


def body(lark: Lark, tool: Tool) -> str:
    """The parameters, each on lines of its own."""
    return elements_body(lark, tool, lambda key: f"<parameter={key}>\n", "\n</parameter>\n")


FORMAT = ChatFormat(
    name="qwen_xml",
    signs=(FUNCTION,),
    read=read,
    spelling=Spelling(lambda name: f"{BEGIN}\n{FUNCTION}{name}>\n", f"</function>\n{END}", body, trigger=BEGIN),
    marks=(BEGIN, END),
)
