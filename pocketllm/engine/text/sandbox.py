"""The environment that chat templates run in: what transformers gives them, and limits on what they may do.

A template comes from a downloaded file. It cannot reach Python's internals (jinja2's immutable sandbox), and it has a
budget of time and of text, so that it ends with an error where it would not end or fill the memory.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

from jinja2 import Template, nodes, pass_context
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from pocketllm.engine.text.protection import MARK

MAX_TIME_S = 5.0
MAX_TEXT = 16_000_000
MAX_MADE = 16 * MAX_TEXT
"""Characters that all steps of one rendering may make together."""
MAX_ITEMS = 250_000
"""Items of a list or a dict, those of what it holds included, however often the same one is held."""
MAX_WIDTH = 1_000_000
MAX_BITS = 4096
MAX_INDENT = 64
_WIDE_FORMAT = re.compile(r"\d{7}")
_NUMBER = re.compile(r"\d+", re.ASCII)
_NESTED_FORMAT = re.compile(r"\{[^{}]*\{")
_FORMATS = ("format", "format_map")
_WIDTH_FILTERS = frozenset(("batch", "center", "format", "indent", "slice", "truncate", "wordwrap"))


class TemplateLimitError(Exception):
    """A template went over its budget."""


class TemplateMessageError(Exception):
    """A template called `raise_exception`: the conversation is not one that it takes."""


@dataclass
class _Budget:
    ends: float = field(default_factory=lambda: time.monotonic() + MAX_TIME_S)
    made: int = 0

    def make(self, length: int) -> None:
        """Count a text that was made along the way."""
        self.made += length
        if self.made > MAX_MADE:
            raise TemplateLimitError(f"its steps made more than {MAX_MADE} characters of text")

    def tick(self) -> None:
        if time.monotonic() > self.ends:
            raise TemplateLimitError(f"it ran longer than {MAX_TIME_S:g} s")


_budget: ContextVar[_Budget] = ContextVar("budget")


def run(template: Template, variables: dict[str, Any]) -> str:
    """The text that `template` makes; TemplateLimitError past the budget, else what it raises."""
    token = _budget.set(_Budget())
    try:
        parts, length = [], 0
        for part in template.generate(variables):
            length += len(part)
            _check_length(length)
            _budget.get().tick()
            parts.append(part)
        return "".join(parts)
    finally:
        _budget.reset(token)


def _check_length(length: int) -> None:
    if length > MAX_TEXT:
        raise TemplateLimitError(f"it made more than {MAX_TEXT} characters of text")


def _checked(value: Any) -> Any:
    """`value`, unless it is too long for a text, or holds too much."""
    if isinstance(value, str):
        _check_length(len(value))
        _budget.get().make(len(value))
    elif isinstance(value, _HOLDERS):
        _check_holder(value)
    return value


_HOLDERS = (list, tuple, dict, set, frozenset, Namespace)
_NAMESPACE = "_Namespace__attrs"


def _check_holder(value: Any) -> None:
    """Refuse what would be too long to print or compare: lists that hold one list twice, thirty deep, for instance."""
    items, length, level = 0, 0, [value]
    while level:
        _budget.get().tick()
        below: list[Any] = []
        for holder in level:
            held = getattr(holder, _NAMESPACE) if isinstance(holder, Namespace) else holder
            for item in (*held, *held.values()) if isinstance(held, dict) else held:
                items += 1
                if isinstance(item, str):
                    length += str.__len__(item)
                elif isinstance(item, _HOLDERS):
                    below.append(item)
            if items > MAX_ITEMS:
                raise TemplateLimitError(f"it made a list of more than {MAX_ITEMS} items, those of its items included")
            _check_length(length)
        level = below


@pass_context
def _weighed(_context: Context, value: Any) -> Any:
    """A list, tuple or dict that the template spells out."""
    return _checked(value)


def _concat(parts: Iterable[str]) -> str:
    """What macros, set blocks and filter blocks join."""
    parts = list(parts)
    length = sum(map(str.__len__, parts))
    _check_length(length)
    _budget.get().make(length)
    _budget.get().tick()
    return "".join(parts)


def _check_widths(args: Iterable[Any]) -> None:
    """Refuse widths and counts that only a request for gigabytes would use."""
    for value in args:
        if isinstance(value, int) and abs(value) > MAX_WIDTH:
            raise TemplateLimitError(f"it asked for a width or count of {value}, more than {MAX_WIDTH}")


def _texts(args: Iterable[Any]) -> Iterator[Any]:
    """Arguments of a format, and what a tuple or a dict of them holds."""
    for value in args:
        yield value
        if isinstance(value, tuple | dict):
            yield from value.values() if isinstance(value, dict) else value


def _check_format(template: str, args: Iterable[Any]) -> None:
    """Refuse a format that would make too much: by its widths, or by putting long texts into many places."""
    if _WIDE_FORMAT.search(template):
        raise TemplateLimitError("it used a format with a width of more than six digits")
    _check_length(sum(map(int, _NUMBER.findall(template))))
    longest = max((len(value) for value in args if hasattr(value, "__len__")), default=0)
    _check_length(longest * max(template.count("%"), template.count("{")))


def _check_growth(name: str, args: Sequence[Any]) -> None:
    """Refuse a replacement or a joining whose text would be over the budget, before it is made."""
    texts = [value for value in args if isinstance(value, str)]
    if name == "replace" and len(texts) >= 3:
        text, old, new = texts[:3]
        _check_length(len(text) + text.count(old) * len(new))
    if name == "join":
        # what is joined and what joins it: lists or texts, in the order of the filter or of the method
        first, second = [*(value for value in args if isinstance(value, str | list | tuple)), "", ""][:2]
        parts = [part for value in (first, second) if not isinstance(value, str) for part in value]
        _check_length(len(first) * len(second) + sum(len(part) for part in parts if isinstance(part, str)))


def _limited_format(template: Any, method: Any) -> Any:
    """`str.format` of `template`, held to the budget."""
    if not isinstance(template, str):
        return method

    def call(*args: Any, **kwargs: Any) -> Any:
        _check_format(template, _texts([*args, *kwargs.values()]))
        if _NESTED_FORMAT.search(template):
            _check_widths([*args, *kwargs.values()])
        return method(*args, **kwargs)

    return call


def _limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter `function`, held to the budget."""

    @wraps(function)  # keeps the attributes by which jinja2 knows what to pass
    def call(*args: Any, **kwargs: Any) -> Any:
        _budget.get().tick()
        if name in _WIDTH_FILTERS:
            _check_widths([*args, *kwargs.values()])
        if name == "format":
            _check_format(str(args[0]), _texts([*args[1:], *kwargs.values()]))
        _check_growth(name, [*args, *kwargs.values()])
        return _checked(function(*args, **kwargs))

    return call


@pass_context  # what depends on the context is not evaluated while compiling, before there is a budget
def _metered(_context: Context, items: Iterable[Any]) -> Iterator[Any]:
    """The items of a loop, with a look at the clock between them."""
    for item in items:
        _budget.get().tick()
        yield item


@pass_context
def _joined(_context: Context, parts: Iterable[Any]) -> str:
    """What the operator `~` does."""
    return _concat(str(part) for part in parts)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "**", "%"])
    concat = staticmethod(_concat)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_BITS:
                raise TemplateLimitError(f"it computed with a number of more than {MAX_BITS} bits")
        elif operator == "%" and isinstance(left, str):
            _check_format(left, _texts([right]))
            _check_widths(right if "*" in left and isinstance(right, tuple) else ())
        elif operator == "+" and isinstance(left, str | list | tuple):
            _check_length(len(left) + (len(right) if hasattr(right, "__len__") else 0))
        elif operator == "*":
            size = next((len(side) for side in (left, right) if hasattr(side, "__len__")), 0)
            _check_length(size * next((side for side in (left, right) if isinstance(side, int)), 0))
        result = super().call_binop(context, operator, left, right)
        return result if isinstance(result, int | float) else _checked(result)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _budget.get().tick()
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str | int):
            _check_widths([*args, *kwargs.values()])
        if isinstance(owner, str):
            _check_growth(obj.__name__, [owner, *args, *kwargs.values()])
        return _checked(super().call(context, obj, *args, **kwargs))

    def getattr(self, obj: Any, attribute: str) -> Any:
        value = super().getattr(obj, attribute)
        return _limited_format(obj, value) if attribute in _FORMATS else value

    def getitem(self, obj: Any, argument: Any) -> Any:
        item = super().getitem(obj, argument)
        return _limited_format(obj, item) if argument in _FORMATS else item

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = _filtered("metered", loop.iter)
        for concat in list(tree.find_all(nodes.Concat)):
            concat.nodes = [_filtered("joined", nodes.List(concat.nodes, lineno=concat.lineno))]
        _Weigh().visit(tree)
        tree.set_environment(self)
        return tree


class _Weigh(NodeTransformer):
    """Puts every list, tuple and dict that is spelled out, and not of constants alone, under `weighed`."""

    def _visit(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        is_target = getattr(node, "ctx", "load") != "load"
        return node if is_target or not any(node.find_all(nodes.Name)) else _filtered("weighed", node)

    visit_List = visit_Tuple = visit_Dict = _visit  # noqa: N815  # names that jinja2 looks for


def _filtered(name: str, node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks what the model wrote; here it only passes its body on."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes for HTML."""
    width = len(indent) if isinstance(indent, str) else indent or 0
    if width > MAX_INDENT or sum(map(len, separators or ())) > MAX_INDENT:
        raise TemplateLimitError(f"it asked for JSON with an indent or separators of more than {MAX_INDENT}")
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return text.replace(f"\\u{ord(MARK):04x}", MARK) if ensure_ascii else text


def _raise_exception(message: str) -> NoReturn:
    raise TemplateMessageError(message)


def make_environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    """An environment with the filters, functions, tags and white-space rules that chat templates are written for."""
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _Generation])
    filters = environment.filters
    filters["tojson"] = _to_json
    for name, function in list(filters.items()):
        filters[name] = _limited(name, function)
    filters |= {"metered": _metered, "joined": _joined, "weighed": _weighed}
    del environment.globals["lipsum"]
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: now().strftime(format)
    return environment
