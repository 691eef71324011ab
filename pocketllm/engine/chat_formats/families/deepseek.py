"""DeepSeek V3, R1 and V3.1: calls between marks of wide bars, V3's with the JSON in a fence."""

from pocketllm.engine.chat_formats.contract import ChatFormat, Spelling
from pocketllm.engine.chat_formats.reading import Reader, Steps


def mark(words: str) -> str:
    """A mark of these formats: its words are joined by a wide underscore."""
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


ALL_BEGIN, ALL_END = mark("tool calls begin"), mark("tool calls end")
BEGIN, END, SEPARATOR = mark("tool call begin"), mark("tool call end"), mark("tool sep")
FENCE = "```"


def read(reader: Reader) -> Steps[None]:
    """Calls between marks."""
    while (yield from reader.until((ALL_BEGIN,), reader.content)) is not None:
        while (yield from reader.until((BEGIN, ALL_END), lambda text: None)) == BEGIN:
            yield from read_call(reader)


def read_call(reader: Reader) -> Steps[None]:
    """`function` and a name, then the JSON in a fence; or the name at once, then the JSON bare."""
    name, closing = yield from reader.text_until((SEPARATOR, END))
    if closing != SEPARATOR:
        return
    yield from reader.skip_blanks()
    if name.strip() == "function" and (yield from reader.peek()) != "{":
        name, closing = yield from reader.text_until(("\n",))
        if closing is None:
            return
        yield from reader.until(("{",), lambda text: None)
        reader.skip(-1)
    reader.begin_call(name.strip())
    yield from reader.json_value(reader.arguments)
    yield from reader.until((END,), lambda text: None)


MARKS = (ALL_BEGIN, ALL_END, BEGIN, END, SEPARATOR)
FORMAT = ChatFormat(
    name="deepseek",
    signs=(ALL_BEGIN, "```json"),
    read=read,
    spelling=Spelling(
        lambda name: f"{BEGIN}function{SEPARATOR}{name}\n{FENCE}json\n",
        f"\n{FENCE}{END}",
        head=ALL_BEGIN,
        tail=ALL_END,
        trigger=ALL_BEGIN,
    ),
    marks=MARKS,
)
FORMAT_V31 = ChatFormat(
    name="deepseek_v31",
    signs=(ALL_BEGIN,),
    read=read,
    spelling=Spelling(
        lambda name: f"{BEGIN}{name}{SEPARATOR}", END, head=ALL_BEGIN, between="", tail=ALL_END, trigger=ALL_BEGIN
    ),
    marks=MARKS,
)
