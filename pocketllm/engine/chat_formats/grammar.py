"""Builds Lark grammars, where a text may hold control tokens, which are named by their ids."""

import json
import re
from collections.abc import Mapping
from typing import Any

from pocketllm.engine.structured.constraint import prepared

ANYTHING = r"/(.|\n)*/"


class Lark:
    """Rules under way. control_ids: spelling → id of the control tokens that texts may hold."""

    def __init__(self, control_ids: Mapping[str, int]) -> None:
        self.control_ids = self._ids = dict(control_ids)
        spellings = sorted(control_ids, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, spellings)) + ")") if spellings else None
        self._rules: list[str] = []
        self._num_made = 0

    def text(self, text: str) -> str:
        """An expression that matches this text, its control tokens as themselves; empty for no text."""
        pieces = filter(None, self._pieces(text))
        return " ".join(f"<[{self._ids[piece]}]>" if piece in self._ids else literal(piece) for piece in pieces)

    def json(self, schema: Mapping[str, Any]) -> str:
        """An expression that matches JSON of a schema."""
        return self.made(f"%json {json.dumps(prepared(schema, 'tools'), ensure_ascii=False)}")

    def up_to(self, end: str) -> str:
        """An expression that matches any text up to `end`, and `end`.

        Where `end` holds a control token, the text cannot hold what stands before that.
        """
        first, *rest = filter(None, self._pieces(end))
        if first in self._ids:
            return f"{self.terminal(ANYTHING)} {self.text(end)}"
        name = self._name("until")
        self._rules.append(f"{name}[lazy]: {self.terminal(ANYTHING)} {literal(first)}")
        return f"{name} {self.text(''.join(rest))}".rstrip()

    def made(self, body: str) -> str:
        """A rule with a name of its own."""
        name = self._name("rule")
        self.rule(name, body)
        return name

    def terminal(self, body: str) -> str:
        """A terminal with a name of its own."""
        name = self._name("TEXT")
        self.rule(name, body)
        return name

    def rule(self, name: str, body: str) -> None:
        """Add a rule."""
        self._rules.append(f"{name}: {body}")

    def source(self, start: str) -> str:
        """The whole grammar."""
        return "\n".join([f"start: {start}", *self._rules])

    def rules(self, name: str, body: str) -> str:
        """All rules as a part of another grammar, with `name` for the one that begins."""
        return "\n".join([f"{name}: {body}", *self._rules])

    def _pieces(self, text: str) -> list[str]:
        return self._split.split(text) if self._split else [text]

    def _name(self, stem: str) -> str:
        self._num_made += 1
        return f"{stem}_{self._num_made}"


def literal(text: str) -> str:
    """A text in Lark's quotes."""
    return json.dumps(text, ensure_ascii=False)
