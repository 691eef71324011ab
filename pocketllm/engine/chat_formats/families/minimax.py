"""MiniMax M2: <invoke name="…"> with <parameter name="…"> elements, between marks of its own."""

from pocketllm.engine.chat_formats.contract import ChatFormat, Spelling, Tool
from pocketllm.engine.chat_formats.elements_grammar import elements_body
from pocketllm.engine.chat_formats.grammar import Lark
from pocketllm.engine.chat_formats.reading import Reader, Steps
from pocketllm.engine.chat_formats.xml_call import Elements, element_arguments

BEGIN, END = "<minimax:tool_call>", "</minimax:tool_call>"
INVOKE = '<invoke name="'
ELEMENTS = Elements('<parameter name="', '">', "</parameter>", "</invoke>")


def read(reader: Reader) -> Steps[None]:
    """Calls between marks."""
    while (yield from reader.until((BEGIN,), reader.content)) is not None:
        yield from read_invokes(reader, INVOKE, END, ELEMENTS)


def read_invokes(reader: Reader, invoke: str, end: str, elements: Elements) -> Steps[None]:
    """Calls up to the mark that ends them; blanks, and anything else between them, are left out."""
    while (yield from reader.until((invoke, end), lambda text: None)) == invoke:
        name, closing = yield from reader.text_until(('">',))
        if closing is None:
            return
        yield from element_arguments(reader, name.strip(), elements)


def body(lark: Lark, tool: Tool) -> str:
    """The parameters, one a line."""
    return elements_body(lark, tool, lambda key: f'<parameter name="{key}">', "</parameter>\n")


FORMAT = ChatFormat(
    name="minimax",
    signs=(BEGIN,),
    read=read,
    spelling=Spelling(lambda name: f'{INVOKE}{name}">\n', "</invoke>\n", body, f"{BEGIN}\n", "", END, BEGIN),
    marks=(BEGIN, END),
)
