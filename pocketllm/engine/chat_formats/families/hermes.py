"""Hermes, Qwen 2.5 and 3, SmolLM3 and others: JSON between <tool_call> and </tool_call>."""

import json

from pocketllm.engine.chat_formats.contract import ChatFormat, Spelling
from pocketllm.engine.chat_formats.json_call import json_call
from pocketllm.engine.chat_formats.reading import Reader, Steps

BEGIN, END = "<tool_call>", "</tool_call>"


def read(reader: Reader) -> Steps[None]:
    """Calls between marks; what is between marks and no call is content."""
    while (yield from reader.until((BEGIN,), reader.content)) is not None:
        if not (yield from json_call(reader)):
            reader.content(BEGIN)
            continue
        yield from reader.skip_blanks()
        yield from reader.closes(END)


FORMAT = ChatFormat(
    name="hermes",
    signs=(BEGIN,),
    read=read,
    spelling=Spelling(
        lambda name: f'{BEGIN}\n{{"name": {json.dumps(name)}, "arguments": ', f"}}\n{END}", trigger=BEGIN
    ),
    marks=(BEGIN, END),
)
