"""Texts as CI systems take them: XML without forbidden characters, GitHub's commands and their limits; pure."""

import re
from collections.abc import Iterator, Sequence

MAX_ANNOTATIONS = 10
"""Errors (and again warnings, and notices) that GitHub shows of one step."""
MAX_ANNOTATION_BYTES = 4096
"""Bytes of an annotation's message; GitHub cuts at 64 KiB, and nobody reads that."""
MAX_SUMMARY_BYTES = 1024 * 1024
"""GitHub refuses a longer step summary."""

NOT_XML = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def clean(text: str) -> str:
    """A text without the characters that XML 1.0 cannot hold."""
    return NOT_XML.sub("", text)


def annotation(level: str, title: str, message: str) -> str:
    """One workflow command; level: error, warning or notice.

    >>> annotation("error", "capital, cpu", "50 %")
    '::error title=capital%2C cpu::50 %25'
    """
    return f"::{level} title={escape_property(title)}::{escape_message(shorten(message, MAX_ANNOTATION_BYTES))}"


def limited(lines: Sequence[str], title: str) -> Iterator[str]:
    """Up to as many annotations of one level as GitHub shows; the last one counts those that do not fit."""
    if len(lines) <= MAX_ANNOTATIONS:
        yield from lines
        return
    yield from lines[: MAX_ANNOTATIONS - 1]
    head = lines[0].partition("::")[2].partition(" ")[0]
    yield f"::{head} title={escape_property(title)}::and {len(lines) - MAX_ANNOTATIONS + 1} more, in the step summary"


def escape_message(text: str) -> str:
    """A workflow command's message."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def escape_property(text: str) -> str:
    """A workflow command's property."""
    return escape_message(text).replace(":", "%3A").replace(",", "%2C")


def shorten(text: str, num_bytes: int) -> str:
    """A text of at most so many UTF-8 bytes, cut with `…`."""
    encoded = text.encode()
    return text if len(encoded) <= num_bytes else encoded[: num_bytes - 3].decode(errors="ignore") + "…"


def cell(text: str) -> str:
    """A text inside a Markdown table."""
    return " ".join(clean(text).replace("|", "\\|").split())
