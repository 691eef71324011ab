"""Fields that hold an answer to a grammar: OpenAI's, vLLM's and llama.cpp's, of which a request gives at most one.

`response_format` is OpenAI's, with llama.cpp's `schema` beside json_object; `structured_outputs` and its older spelling
`guided_*` are vLLM's; `grammar` (GBNF) and `json_schema` at the top are llama.cpp's. A schema always holds: `strict`
false is no permission to ignore it.
"""

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from pocketllm.engine.structured import constraint
from pocketllm.engine.structured.constraint import Constraint
from pocketllm.errors import RequestError

FIELDS = frozenset(
    (
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "grammar",
        "json_schema",
    )
)
"""Names of all of them."""

Make = Callable[[Any, str], Constraint]
KINDS: Mapping[str, Make] = {
    "json": constraint.json_schema,
    "regex": constraint.regex,
    "choice": constraint.choice,
    "grammar": constraint.grammar,
}


class StructuredFields(BaseModel):
    """What both endpoints take; their meaning is checked by `constraint_of`."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | bool | None = None


def may_compile(document: Mapping[str, Any]) -> bool:
    """Whether a body may hold a grammar, which takes milliseconds to compile, the first one the whole vocabulary."""
    choice = document.get("tool_choice")
    is_forced = choice is not None and choice not in ("none", "auto")
    return is_forced or any(document.get(name) is not None for name in (*FIELDS, "text"))


def constraint_of(body: StructuredFields) -> Constraint | None:
    """What a body holds its answer to. Raises RequestError for a field that is wrong, and for two that differ."""
    found = [one for one in (from_format(body.response_format), from_vllm(body.structured_outputs)) if one is not None]
    for kind, make in KINDS.items():
        name = f"guided_{kind}"
        if (value := getattr(body, name)) is not None:
            found.append(make(value, name))
    if body.grammar:  # llama.cpp's clients send "" for none
        found.append(constraint.grammar(body.grammar, "grammar"))
    if body.json_schema is not None:
        found.append(constraint.json_schema(body.json_schema, "json_schema"))
    if len(found) > 1:
        first, second = found[0].param, found[1].param
        raise RequestError(f"{first} and {second} both say what the answer must be: give one of them", param=second)
    return found[0] if found else None


def from_format(given: Mapping[str, Any] | None) -> Constraint | None:
    """`response_format`."""
    if given is None:
        return None
    name = "response_format"
    match given.get("type"):
        case "text":
            refuse_others(given, {"type"}, name)
            return None
        case "json_object":
            refuse_others(given, {"type", "schema"}, name)
            if given.get("schema") is not None:
                return constraint.json_schema(given["schema"], name)
            return constraint.json_object(name)
        case "json_schema":
            refuse_others(given, {"type", "json_schema"}, name)
            return constraint.json_schema(schema_of(given.get("json_schema")), name)
        case kind:
            raise RequestError(
                f"{name} has type {str(kind)[:100]!r}; text, json_object and json_schema are served", param=name
            )


def schema_of(given: Any) -> Any:
    """The schema in `response_format.json_schema`."""
    name = "response_format.json_schema"
    if not isinstance(given, Mapping):
        raise RequestError(f"{name} must be an object with a name and a schema", param=name)
    refuse_others(given, {"name", "schema", "strict", "description"}, name)
    if not isinstance(given.get("strict"), bool | None):
        raise RequestError(f"{name}.strict must be true or false", param=name)
    if given.get("schema") is None:
        raise RequestError(f"{name}.schema is missing", param=name)
    return given["schema"]


def from_vllm(given: Mapping[str, Any] | None) -> Constraint | None:
    """`structured_outputs`."""
    if given is None:
        return None
    name = "structured_outputs"
    refuse_others(given, {*KINDS, "json_object"}, name)
    found = [make(given[kind], name) for kind, make in KINDS.items() if given.get(kind) is not None]
    if given.get("json_object"):
        found.append(constraint.json_object(name))
    if len(found) != 1:
        raise RequestError(
            f"{name} must have exactly one of {', '.join(KINDS)} and json_object, not {len(found)}", param=name
        )
    return found[0]


def refuse_others(given: Mapping[str, Any], known: set[str], name: str) -> None:
    """Raise RequestError for a key that nobody here reads."""
    for key, value in given.items():
        if key not in known and value is not None:
            raise RequestError(f"{name}: field {str(key)[:100]!r} is not supported", param=name)
