"""The pages under docs/models/ and the README: tables written from records, and claims held against them; pure.

A generated part stands between two markers and is replaced as a whole:

    <!-- generated: ladder smollm2-135m -->        (a part of PARTS; a model's name, or * for all of them)
    <!-- end -->
"""

import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from pocketllm.errors import RecordError
from pocketllm.evidence.model_pages.parity import parity_part
from pocketllm.evidence.model_pages.source import EVERY_MODEL, Source
from pocketllm.evidence.model_pages.speeds import performance_part
from pocketllm.evidence.model_pages.tables import features_part, ladder_part, matrix_part

__all__ = ["EVERY_MODEL", "PARTS", "Source", "generated_parts", "regenerate"]

BEGIN = re.compile(r"^<!-- generated: (\w+) (\S+) -->$")
END = "<!-- end -->"
MARKER = re.compile(r"^<!-- (generated|end)\b")
PARTS: Mapping[str, Callable[[str, Source], Iterator[str]]] = MappingProxyType(
    {
        "matrix": matrix_part,
        "ladder": ladder_part,
        "features": features_part,
        "performance": performance_part,
        "parity": parity_part,
    }
)
"""What can be generated: from a model's name and the source, lines of Markdown."""


def regenerate(page: str, text: str, source: Source) -> str:
    """A page's text with every generated part written anew; RecordError when its markers do not pair."""
    lines: list[str] = []
    inside: str | None = None
    for place, line in enumerate(text.splitlines(), 1):
        begin = BEGIN.match(line)
        if MARKER.match(line) and (bool(begin) == bool(inside) or not (begin or line == END)):
            raise RecordError(
                f"{page}:{place}: unexpected marker {line!r}: `generated: WHAT MODEL` and `end` take turns"
            )
        if begin:
            inside, model = begin.groups()
            if inside not in PARTS:
                raise RecordError(f"{page}:{place}: no generated part {inside!r}; known: {', '.join(PARTS)}")
            lines += [line, "", *PARTS[inside](model, source), ""]
        if line == END:
            inside = None
        if inside is None:
            lines.append(line)
    if inside:
        raise RecordError(f"{page}: the generated part {inside!r} has no {END!r}")
    return "\n".join(lines) + "\n"


def generated_parts(text: str) -> dict[tuple[str, str], list[tuple[int, str]]]:
    """The lines of each generated part of a page, by what and for which model, with their numbers."""
    found: dict[tuple[str, str], list[tuple[int, str]]] = {}
    inside: tuple[str, str] | None = None
    for place, line in enumerate(text.splitlines(), 1):
        if begin := BEGIN.match(line):
            inside = (begin[1], begin[2])
        elif line == END:
            inside = None
        elif inside and line:
            found.setdefault(inside, []).append((place, line))
    return found
