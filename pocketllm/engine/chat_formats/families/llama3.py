"""Llama 3.1 to 3.3: an answer that is a JSON object {"name": …, "parameters": {…}}, sometimes after a token."""

import json

from pocketllm.engine.chat_formats.contract import ChatFormat, Spelling
from pocketllm.engine.chat_formats.grammar import Lark
from pocketllm.engine.chat_formats.json_call import json_calls
from pocketllm.engine.chat_formats.reading import Reader, Steps

TAG = "<|python_tag|>"


def read(reader: Reader) -> Steps[None]:
    """A call only where it begins the answer, and only of a tool that was offered: other JSON is content."""
    place = reader.mark()
    yield from reader.skip_blanks()
    is_tagged = yield from reader.takes(TAG)
    is_call = (yield from reader.peek()) == "{" and (yield from json_calls(reader, (";", ",")))
    if not is_call:
        reader.rewind(place)
    reader.forget()
    if is_call or not is_tagged:
        yield from reader.until((TAG,), reader.content)
    yield from reader.until((TAG,), reader.content)


def not_json(lark: Lark) -> str:
    """An answer that does not begin like a call."""
    return lark.terminal(r"/[^{\s](.|\n)*/")


FORMAT = ChatFormat(
    name="llama3",
    signs=("<|start_header_id|>", "parameters"),
    read=read,
    spelling=Spelling(lambda name: f'{{"name": {json.dumps(name)}, "parameters": ', "}", between="; ", free=not_json),
    marks=(TAG,),
)
