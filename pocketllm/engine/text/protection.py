"""Keeps the text of a message from turning into control tokens on its way through a chat template.

A template joins its own control tokens and the texts of a conversation into one string, which is then parsed for
control tokens. `protect` breaks every spelling of a control token in a message with MARK, a Unicode noncharacter;
`unprotect` takes the marks out again once the string has been cut at the real ones. A MARK that was in the text
from the start is doubled, so that nothing is lost. Texts without either stay exactly as they are.
"""

from collections.abc import Callable
from typing import Any

from pocketllm.engine.text.token_scanner import TokenScanner

MARK = "\ufdd0"


def unprotect(text: str) -> str:
    """`text` as it was before `protect`."""
    text = str(text)  # the characters with marks, free of the methods below
    if MARK not in text:
        return text
    return MARK.join(part.replace(MARK, "") for part in text.split(MARK + MARK))


class ProtectedText(str):
    """A text with marks inside, which a template can still look into: what compares, searches, cuts or trims works on
    the text without marks and gives protected parts; what copies (output, `+`, JSON) carries the marks along."""

    __slots__ = ("_scanner",)
    _scanner: TokenScanner

    def __eq__(self, other: object) -> bool:
        return bool(_plain(self) == _plain(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(_plain(self))

    def __len__(self) -> int:
        return len(unprotect(self))

    def __contains__(self, part: object) -> bool:
        return isinstance(part, str) and unprotect(part) in unprotect(self)


def protect(text: str, scanner: TokenScanner) -> str:
    """`text` with every spelling that `scanner` knows broken by MARK; the same object where there is none."""
    parts = []
    done = 0
    for begin, end in scanner.spans(text):
        # a mark after every character: a template that takes the text apart and joins it again keeps it broken
        parts += [_doubled(text[done:begin]), MARK.join(map(_doubled, text[begin:end]))]
        done = end
    if not parts and MARK not in text:
        return text
    return _with_scanner("".join([*parts, _doubled(text[done:])]), scanner)


def _with_scanner(marked: str, scanner: TokenScanner) -> ProtectedText:
    protected = ProtectedText(marked)
    protected._scanner = scanner
    return protected


def _doubled(text: str) -> str:
    return text.replace(MARK, MARK + MARK)


def _plain(value: Any) -> Any:
    return unprotect(value) if isinstance(value, str) else value


def _on_plain_text(name: str) -> Callable[..., Any]:
    method = getattr(str, name)

    def call(self: ProtectedText, *args: Any, **kwargs: Any) -> Any:
        return _protected(method(unprotect(self), *map(_plain, args), **kwargs), self._scanner)

    return call


def _protected(value: Any, scanner: TokenScanner) -> Any:
    if isinstance(value, str):
        # a part without spellings stays under watch: it may be made into one, by a change of case for instance
        return _with_scanner(str(protect(value, scanner)), scanner)
    if isinstance(value, list | tuple):
        return type(value)(_protected(item, scanner) for item in value)
    return value


_LOOKING = (
    "strip lstrip rstrip removeprefix removesuffix split rsplit splitlines partition rpartition "
    "startswith endswith find rfind index rindex count lower upper title capitalize isspace isdigit isalpha"
)
for _name in _LOOKING.split():
    setattr(ProtectedText, _name, _on_plain_text(_name))
