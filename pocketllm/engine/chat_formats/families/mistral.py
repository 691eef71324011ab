"""Mistral: [TOOL_CALLS] and a JSON list of calls, or, since 2025, a name, [ARGS] and the arguments for each."""

import json

from pocketllm.engine.chat_formats.contract import ChatFormat, Spelling
from pocketllm.engine.chat_formats.json_call import json_call
from pocketllm.engine.chat_formats.markup import Thought
from pocketllm.engine.chat_formats.reading import Reader, Steps

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
THOUGHT = Thought("[THINK]", "[/THINK]")


def read(reader: Reader) -> Steps[None]:
    """Calls after the mark, which comes once for a list and once for each named call."""
    while (yield from reader.until((CALLS,), reader.content)) is not None:
        yield from reader.skip_blanks()
        if (yield from reader.peek()) in ("[", "{"):
            yield from read_list(reader)
        else:
            yield from read_named(reader)


def read_list(reader: Reader) -> Steps[None]:
    """`[{"name": …, "arguments": …}, …]`"""
    yield from reader.takes("[")
    while (yield from json_call(reader)):
        yield from reader.skip_blanks()
        if not (yield from reader.takes(",")):
            break
    yield from reader.skip_blanks()
    yield from reader.takes("]")


def read_named(reader: Reader) -> Steps[None]:
    """`name[ARGS]{…}`, with `[CALL_ID]…` between in some."""
    name, closing = yield from reader.text_until((ARGS, CALL_ID, "{"))
    if closing == CALL_ID:
        _, closing = yield from reader.text_until((ARGS, "{"))
    if closing is None or not name.strip():
        reader.content(CALLS + name + (closing or ""))
        return
    if closing == "{":
        reader.skip(-1)
    reader.begin_call(name.strip())
    yield from reader.json_value(reader.arguments)


FORMAT = ChatFormat(
    name="mistral",
    signs=(CALLS,),
    read=read,
    spelling=Spelling(
        lambda name: f'{{"name": {json.dumps(name)}, "arguments": ',
        "}",
        head=f"{CALLS}[",
        between=", ",
        tail="]",
        trigger=CALLS,
    ),
    marks=(CALLS, ARGS, CALL_ID, THOUGHT.begin, THOUGHT.end),
    thoughts=(THOUGHT,),
)
FORMAT_NAMED = ChatFormat(
    name="mistral_named",
    signs=(ARGS,),
    read=read,
    spelling=Spelling(lambda name: f"{CALLS}{name}{ARGS}", "", between="", trigger=CALLS),
    marks=FORMAT.marks,
    thoughts=(THOUGHT,),
)
