"""What an answer must obey, in the words of a request; sizes are checked here, meaning when it is compiled.

Each function makes a `Constraint` or raises RequestError, which names `param`, the field that the source came in.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pocketllm.engine.structured.formats import with_patterns
from pocketllm.errors import RequestError

MAX_SOURCE = 256 * 2**10
"""Most characters of a schema, a grammar, a regular expression, or all choices together."""
MAX_CHOICES = 4096
INVALID_GRAMMAR = "invalid_grammar"
"""What machines read of a refused constraint, whoever found the fault."""

WHITESPACE = r"\n[ \t]{0,40}|[ \t]{1,2}"
"""Between the tokens of JSON: a line end with its indent, or up to two blanks. Unbounded, weak models fill the rest of
an answer with blanks."""


SCHEMA_OPTIONS = {"whitespace_pattern": WHITESPACE, "coerce_one_of": False}
"""llguidance's for a schema. Read as anyOf, a oneOf whose branches overlap would allow what it forbids."""


@dataclass(frozen=True)
class Constraint:
    """A grammar as llguidance takes it. Hashable, so that a compiled one is found again."""

    kind: str
    """json_object, json_schema, regex, choice, gbnf, lark or tools: for messages and metrics."""
    bodies: tuple[str, ...] = field(repr=False)
    """Grammars of llguidance as JSON, {"lark_grammar": …} or {"json_schema": …}: the text obeys one of them."""
    param: str = "structured_outputs"
    preface: str = field(default="", repr=False)
    """Lark rules of what may stand before it, `preface` among them."""

    @property
    def grammar(self) -> str:
        """The whole as llguidance's JSON."""
        if not self.preface and len(self.bodies) == 1:
            return f'{{"grammars":[{self.bodies[0]}]}}'
        named = {f"answer_{number}": json.loads(body) for number, body in enumerate(self.bodies)}
        start = f"start: {'preface ' * bool(self.preface)}({' | '.join(f'@{name}' for name in named)})"
        outer = {"lark_grammar": f"{start}\n{self.preface}"}
        return json.dumps({"grammars": [outer, *({"name": name, **body} for name, body in named.items())]})

    def after(self, preface: str) -> "Constraint":
        """The same after a preface, such as a model's reasoning; "" is none."""
        return replace(self, preface=preface)

    def or_else(self, other: "Constraint") -> "Constraint":
        """What obeys either one."""
        return replace(self, bodies=self.bodies + other.bodies)


def json_object(param: str = "response_format") -> Constraint:
    """Any JSON object."""
    return replace(json_schema({"type": "object"}, param), kind="json_object")


def json_schema(schema: Any, param: str = "response_format") -> Constraint:
    """JSON that the schema accepts: an object, a boolean, or JSON text of one."""
    if isinstance(schema, str):
        sized(schema, param)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise unreadable(f"{param}: the schema is not JSON: {error}", param) from error
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, Mapping):
        raise RequestError(f"{param}: the schema must be an object, not {type(schema).__name__}", param=param)
    body = json.dumps({"json_schema": prepared(schema, param)}, ensure_ascii=False)
    return Constraint("json_schema", (sized(body, param),), param)


def prepared(schema: Mapping[str, Any], param: str) -> dict[str, Any]:
    """A schema as llguidance takes it: with our options, and formats that are exact."""
    try:
        # replaces options that a schema brings itself: `lenient` would let keywords pass that nothing obeys
        return {**with_patterns(schema), "x-guidance": SCHEMA_OPTIONS}
    except RecursionError as error:
        raise unreadable(f"{param}: the schema nests too deep", param) from error


def regex(pattern: Any, param: str = "structured_outputs") -> Constraint:
    r"""Text that a regular expression matches whole (Rust's syntax: no look-around; `\d` is 0 to 9)."""
    from llguidance import regex_to_lark

    # anchors at the ends say what holds anyway; elsewhere they are refused when it is compiled
    text = source_text(pattern, "regex", param).removeprefix("^")
    if text.endswith("$") and not re.search(r"(?<!\\)(\\\\)*\\\$$", text):
        text = text[:-1]
    return lark(f"start: /{regex_to_lark(text, 'd')}/", param, "regex")


def choice(options: Any, param: str = "structured_outputs") -> Constraint:
    """One of several texts."""
    if not isinstance(options, Sequence) or isinstance(options, str) or not options:
        raise RequestError(f"{param}: choice must be a list of one or more texts", param=param)
    if len(options) > MAX_CHOICES:
        raise RequestError(f"{param}: {len(options)} choices, the limit is {MAX_CHOICES}", param=param)
    for number, option in enumerate(options):
        if not isinstance(option, str) or not option:
            raise RequestError(f"{param}: choice {number} must be a text of one or more characters", param=param)
    pattern = "|".join(map(escaped, options))
    return lark(f"start: /{sized(pattern, param)}/", param, "choice")


def escaped(text: str) -> str:
    """A regular expression that matches this text alone."""
    return "".join(one if one.isalnum() else rf"\x{{{ord(one):x}}}" for one in text)


def grammar(text: Any, param: str = "structured_outputs") -> Constraint:
    """Text of a grammar: Lark where it defines `start`, otherwise GBNF, whose first rule is `root`."""
    source = source_text(text, "grammar", param)
    if re.search(r"^\s*(%llguidance\b|\??start\b[^:\n]*:(?!:))", source, flags=re.MULTILINE):
        return lark(source, param)
    return gbnf(source, param)


def lark(source: str, param: str, kind: str = "lark") -> Constraint:
    """Text of a Lark grammar, whose first rule is `start`."""
    return Constraint(kind, (json.dumps({"lark_grammar": source}),), param)


def gbnf(text: Any, param: str = "grammar") -> Constraint:
    """Text of llama.cpp's grammar language."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    source = source_text(text, "grammar", param)
    try:
        converted = gbnf_to_lark(plain_escapes(source))
    except RecursionError as error:
        raise unreadable(f"{param}: the grammar nests too deep", param) from error
    except Exception as error:  # the converter raises plain Exceptions, and IndexErrors
        detail = str(error) or "it ends too early"
        raise unreadable(f"{param}: the GBNF grammar cannot be read: {detail}"[:1000], param) from error
    return lark(converted, param, "gbnf")


def plain_escapes(source: str) -> str:
    r"""GBNF with `\uXXXX` and `\UXXXXXXXX` as what they stand for, which Lark spells otherwise."""

    def plain(found: re.Match[str]) -> str:
        digits = found[1] or found[2]
        if digits is None:
            return found[0]
        code = int(digits, 16)
        if code < 0x80:
            return f"\\x{code:02x}"
        return found[0] if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF else chr(code)

    return re.sub(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", plain, source, flags=re.DOTALL)


def unreadable(message: str, param: str) -> RequestError:
    """What is no grammar, with the code of one that cannot be compiled."""
    return RequestError(message, param=param, code=INVALID_GRAMMAR)


def source_text(value: Any, what: str, param: str) -> str:
    """A text of bounded length."""
    if not isinstance(value, str):
        raise RequestError(f"{param}: {what} must be a text, not {type(value).__name__}", param=param)
    if not value:
        raise RequestError(f"{param}: {what} is empty", param=param)
    return sized(value, param)


def sized(text: str, param: str) -> str:
    """The same text; RequestError past MAX_SOURCE characters."""
    if len(text) > MAX_SOURCE:
        raise RequestError(f"{param} has {len(text)} characters, the limit is {MAX_SOURCE}", param=param)
    return text
