"""gpt-oss: messages with a channel each; analysis is thought, final is the answer, functions.NAME is a call."""

import re

from pocketllm.engine.chat_formats.contract import ChatFormat, Spelling
from pocketllm.engine.chat_formats.grammar import ANYTHING, Lark
from pocketllm.engine.chat_formats.markup import Thought
from pocketllm.engine.chat_formats.reading import Reader, Steps, Trimmed

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CALL, RETURN, CONSTRAIN = "<|call|>", "<|return|>", "<|constrain|>"
FINAL = f"{CHANNEL}final{MESSAGE}"
RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
ENDS = (END, CALL, RETURN, START)


def read(reader: Reader) -> Steps[None]:
    """Messages: a header up to its mark, then a body up to one of the marks that end it."""
    while True:
        yield from reader.skip_blanks()
        if not (yield from reader.peek()):
            return
        header, mark = yield from reader.text_until((MESSAGE,))
        if mark is None:
            # no message began: an answer without markup, or a header that was cut
            if CHANNEL not in header and START not in header:
                reader.content(header)
            return
        recipient = RECIPIENT.search(header)
        if recipient is not None:
            reader.begin_call(recipient[1])
            tell = Trimmed(reader.arguments)
        elif f"{CHANNEL}analysis" in header:
            tell = Trimmed(reader.reasoning)
        else:
            yield from reader.until(ENDS, reader.content)
            continue
        yield from reader.until(ENDS, tell)


def preface(lark: Lark, is_call: bool) -> str:
    """Analysis at will, then the header of the final message; a call brings its own."""
    return analysis(lark) if is_call else f"{analysis(lark)} {lark.text(FINAL)}"


def analysis(lark: Lark) -> str:
    """A message of thought, or none."""
    begin, end = lark.text(f"{CHANNEL}analysis{MESSAGE}"), lark.text(f"{END}{START}assistant")
    return f"({begin} {lark.terminal(ANYTHING)} {end})?"


def final(lark: Lark) -> str:
    """The final message, whatever it says."""
    return f"{lark.text(FINAL)} {lark.terminal(ANYTHING)}"


def call_begin(name: str) -> str:
    """What stands before the arguments."""
    return f"{CHANNEL}commentary to=functions.{name} {CONSTRAIN}json{MESSAGE}"


FORMAT = ChatFormat(
    name="harmony",
    signs=(CHANNEL, MESSAGE),
    read=read,
    spelling=Spelling(call_begin, "", between=f"{CALL}{START}assistant", free=final),
    marks=(START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN),
    # nothing before the final message is text that a stop string may end
    thoughts=(Thought("", FINAL, is_open=True),),
    reads_thought=True,
    preface=preface,
)
