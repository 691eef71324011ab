"""DeepSeek V3.2 and V4: invoke and parameter elements marked with the token <｜DSML｜>."""

from collections.abc import Callable

from pocketllm.engine.chat_formats.contract import ChatFormat, Spelling, Tool
from pocketllm.engine.chat_formats.families.minimax import read_invokes
from pocketllm.engine.chat_formats.grammar import Lark
from pocketllm.engine.chat_formats.reading import Reader, Steps
from pocketllm.engine.chat_formats.xml_call import Elements, json_types, properties_of

MARK = "\uff5cDSML\uff5c"
BLOCKS = ("function_calls", "tool_calls")
INVOKE = f'<{MARK}invoke name="'


def opening(text: str) -> tuple[str, bool | None]:
    """`key" string="true`: the name, and whether the value is a text."""
    name, _, rest = text.partition('"')
    return name, {"true": True, "false": False}.get(rest.partition('string="')[2].partition('"')[0])


ELEMENTS = Elements(f'<{MARK}parameter name="', ">", f"</{MARK}parameter>", f"</{MARK}invoke>", opening)


def read(reader: Reader) -> Steps[None]:
    """Calls in a block, whose name differs between versions."""
    begins = {f"<{MARK}{block}>": f"</{MARK}{block}>" for block in BLOCKS}
    while (mark := (yield from reader.until(tuple(begins), reader.content))) is not None:
        yield from read_invokes(reader, INVOKE, begins[mark], ELEMENTS)


def body(lark: Lark, tool: Tool) -> str:
    """The parameters, texts bare and told so."""
    parts = []
    for key, schema, is_required in properties_of(tool.parameters):
        is_text = not (types := json_types(schema)) or "string" in types
        begin = f'<{MARK}parameter name="{key}" string="{str(is_text).lower()}">'
        end = f"</{MARK}parameter>\n"
        value = lark.up_to(end) if is_text else f"{lark.json(schema)} {lark.text(end)}"
        element = lark.made(f"{lark.text(begin)} {value}")
        parts.append(element if is_required else f"{element}?")
    return " ".join(parts)


def made(name: str, block: str, *signs: str) -> ChatFormat:
    """The format with one name of the block; signs: what tells it from the other, templates keep MARK in a variable."""
    begin: Callable[[str], str] = lambda tool: f'{INVOKE}{tool}">\n'  # noqa: E731  # its type is said beside it, or it is one expression
    # the trigger begins with the token: what stands before that cannot be told from other text
    trigger = f"{MARK}{block}>"
    spelling = Spelling(begin, f"</{MARK}invoke>\n", body, f"<{trigger}\n", "", f"</{trigger}", trigger)
    return ChatFormat(name, (MARK, *signs), read, spelling, marks=(MARK,))


FORMAT = made("deepseek_v32", "function_calls", "function_calls>")
FORMAT_V4 = made("deepseek_v4", "tool_calls")
