"""Dates and times of JSON schemas as patterns, so that an answer never holds a day or a second that does not exist.

llguidance's own take February 29 of every year and a second 60 in every minute; RFC 3339 allows the one in leap years
and the other at the end of a UTC day.
"""

from collections.abc import Mapping
from typing import Any

LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
DATE = (
    "([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    f"|{LEAP_YEAR}-02-29)"
)
DAY_MIN = 24 * 60
FRACTION = r"(\.[0-9]+)?"


def leap_seconds() -> str:
    """23:59:60 UTC as every local time shows it: a minute of the day has one offset to either side."""
    found = [f"23:59:60{FRACTION}[Zz]"]
    for minute in range(DAY_MIN):
        east = (minute + 1) % DAY_MIN  # how far beyond 23:59
        ahead, behind = clock(east), clock(-east % DAY_MIN)
        found.append(f"{clock(minute)}:60{FRACTION}([+]{ahead}|-{behind})")
    return "|".join(found)


def clock(minute: int) -> str:
    """A minute of the day as HH:MM."""
    return f"{minute // 60:02}:{minute % 60:02}"


TIME = rf"(([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]{FRACTION}([Zz]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])|{leap_seconds()})"
PATTERNS = {"date": f"^{DATE}$", "time": f"^{TIME}$", "date-time": f"^{DATE}[Tt]{TIME}$"}

SCHEMA = frozenset(
    (
        "additionalProperties",
        "items",
        "additionalItems",
        "contains",
        "propertyNames",
        "not",
        "if",
        "then",
        "else",
        "unevaluatedItems",
        "unevaluatedProperties",
    )
)
SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def with_patterns(schema: Any) -> Any:
    """The same schema with PATTERNS in the place of formats; what is no schema, such as an enum's value, is left."""
    if not isinstance(schema, Mapping):
        return schema
    found = dict(schema)
    for key, value in schema.items():
        if key in SCHEMA and isinstance(value, Mapping):
            found[key] = with_patterns(value)
        elif key in SCHEMAS and isinstance(value, list):
            found[key] = [with_patterns(one) for one in value]
        elif key in NAMED and isinstance(value, Mapping):
            found[key] = {name: with_patterns(one) for name, one in value.items()}
    form = found.get("format")
    others = found.get("allOf", [])
    if isinstance(form, str) and form in PATTERNS and isinstance(others, list):
        del found["format"]
        # beside a pattern of its own, both must hold
        found["allOf"] = [*others, {"pattern": PATTERNS[form]}]
    return found
