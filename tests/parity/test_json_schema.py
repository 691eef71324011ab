"""JSON schemas against people who know: cases of the JSON-Schema-Test-Suite, and a validator that reads what is drawn.

`json_schema_suite.json` holds groups of draft 2020-12, as the JSON-Schema-Test-Suite has them
(https://github.com/json-schema-org/JSON-Schema-Test-Suite, MIT, © 2012 Julian Berman), from the source distribution
of jsonschema 4.25.1: all that must pass and whose schemas are held to here, five formats, and of those refused one
for each reason. Left out are `format.json`, for which a format holds nothing, and what is fetched from elsewhere.
"""

import json
from collections.abc import Iterator
from functools import cache
from itertools import islice, permutations, product
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pocketllm.engine.structured import constraint
from pocketllm.engine.structured.compiler import GrammarCompiler
from pocketllm.engine.structured.constraint import Constraint
from pocketllm.errors import ConstraintError, RequestError
from tests.byte_vocabulary import ByteTokenizer

SUITE = Path(__file__).parents[1] / "oracles" / "json_schema_suite.json"
TOKENIZER = ByteTokenizer()
COMPILER = GrammarCompiler(TOKENIZER)  # type: ignore[arg-type]  # a fake
WALKS = 2
"""Answers drawn from each schema."""


@cache
def suite() -> dict[str, list[dict[str, Any]]]:
    return json.loads(SUITE.read_text(encoding="utf-8"))


def spellings(value: Any) -> Iterator[Any]:
    """The same value in the ways it can be written: properties in any order, a whole number without its fraction."""
    match value:
        case dict() if 0 < len(value) <= 4:
            for names in permutations(value):
                for parts in product(*(tuple(spellings(value[name])) for name in names)):
                    yield dict(zip(names, parts, strict=True))
        case list() if 0 < len(value) <= 4:
            yield from map(list, product(*(tuple(spellings(item)) for item in value)))
        case float() if value.is_integer():
            yield from (value, int(value))
        case _:
            yield value


def takes_value(held: Constraint, value: Any) -> bool:
    """Whether one of a value's spellings is taken: which one is the grammar's choice."""
    return any(takes(held, json.dumps(one, ensure_ascii=False)) for one in islice(spellings(value), 200))


def takes(held: Constraint, text: str) -> bool:
    matcher = COMPILER.matcher(held)
    try:
        for byte in text.encode():
            matcher.accept(byte)
        return matcher.is_complete or bool(matcher.allowed()[TOKENIZER.end])
    except ConstraintError:
        return False


def test_no_invalid_instance_is_taken_and_no_valid_one_is_not() -> None:
    counts, wrong = {True: 0, False: 0}, {True: [], False: []}  # type: ignore[var-annotated]  # filled below
    for group in suite()["held"]:
        held = constraint.json_schema(group["schema"])
        for test in group["tests"]:
            counts[test["valid"]] += 1
            if takes_value(held, test["data"]) != test["valid"]:
                wrong[test["valid"]].append(f"{group['description']}: {test['description']}")

    assert counts[True] > 100
    assert counts[False] > 100
    assert wrong[False] == []
    assert wrong[True] == []


@pytest.mark.parametrize("seed", range(WALKS))
def test_what_is_drawn_from_a_schema_is_valid(seed: int) -> None:
    num_whole = 0
    for group in suite()["held"]:
        matcher = COMPILER.matcher(constraint.json_schema(group["schema"]))
        ids = TOKENIZER.walk(matcher, seed, 120)
        if matcher.is_complete:
            num_whole += 1
            value = json.loads(TOKENIZER.decode(ids))
            jsonschema.validate(value, group["schema"], jsonschema.Draft202012Validator)

    assert num_whole > len(suite()["held"]) / 2


def test_what_is_refused_is_refused_for_a_reason() -> None:
    for group in suite()["refused"]:
        with pytest.raises(RequestError, match=r"cannot be compiled: .{5}"):
            COMPILER.matcher(constraint.json_schema(group["schema"]))
