"""Shapes that bodies and refusals are made of, in JSON Schema: what their readers check beyond Python types."""

from typing import Any

from pocketllm.engine.serving.answers.tools import MAX_TOOLS, NAME

Schema = dict[str, Any]

NULL: Schema = {"type": "null"}
TEXT: Schema = {"type": "string"}


def either(*schemas: Schema) -> Schema:
    """Any of these."""
    return {"anyOf": list(schemas)}


def shaped(required: tuple[str, ...], **properties: Schema) -> Schema:
    """An object of these fields; others may only be null."""
    return {"type": "object", "required": list(required), "properties": properties, "additionalProperties": NULL}


TEXT_PARTS: Schema = {"type": "array", "items": shaped(("type", "text"), type={"const": "text"}, text=TEXT)}
CONTENT = either(TEXT, TEXT_PARTS)
CALL: Schema = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "id": TEXT,
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": TEXT, "arguments": {"type": ["string", "object", "null"]}},
        },
    },
}
NAMED: Schema = {"name": either(TEXT, NULL), "annotations": {"enum": [[], None]}}
THOUGHT: Schema = {"reasoning_content": either(TEXT, NULL), "reasoning": either(TEXT, NULL)}
MESSAGE = either(
    shaped(("role", "content"), role={"enum": ["system", "developer", "user"]}, content=CONTENT, **NAMED),
    shaped(("role", "content"), role={"const": "tool"}, content=CONTENT, tool_call_id=either(TEXT, NULL), **NAMED),
    shaped(
        ("role", "content"),
        role={"const": "assistant"},
        content=CONTENT,
        tool_calls=either({"type": "array", "items": CALL}, NULL),
        **NAMED,
        **THOUGHT,
    ),
    shaped(
        ("role", "tool_calls"),
        role={"const": "assistant"},
        content=either(CONTENT, NULL),
        tool_calls={"type": "array", "minItems": 1, "items": CALL},
        **NAMED,
        **THOUGHT,
    ),
)

FUNCTION = shaped(
    ("name",),
    name={"type": "string", "pattern": f"^{NAME.pattern}$"},
    description=either(TEXT, NULL),
    parameters=either({"type": "object", "properties": {"type": {"const": "object"}}}, NULL),
    strict={"type": ["boolean", "null"]},
)
TOOLS = either(
    {
        "type": "array",
        "maxItems": MAX_TOOLS,
        "items": shaped(("function",), type={"const": "function"}, function=FUNCTION),
    },
    NULL,
)
TOOL_CHOICE = either(
    {"enum": ["none", "auto", "required", None]},
    {
        "type": "object",
        "required": ["type", "function"],
        "properties": {"type": {"const": "function"}, "function": {"type": "object", "required": ["name"]}},
    },
)
SCHEMA: Schema = {"type": ["object", "boolean"]}
RESPONSE_FORMAT = either(
    {"type": "object", "required": ["type"], "properties": {"type": {"enum": ["text", "json_object"]}}},
    {
        "type": "object",
        "required": ["type", "json_schema"],
        "properties": {
            "type": {"const": "json_schema"},
            "json_schema": {"type": "object", "required": ["schema"], "properties": {"schema": SCHEMA}},
        },
    },
    NULL,
)
STRUCTURED_OUTPUTS = either(
    shaped(("json",), json={"type": ["object", "boolean", "string"]}),
    shaped(("regex",), regex=TEXT),
    shaped(("choice",), choice={"type": "array", "minItems": 1, "items": TEXT}),
    shaped(("grammar",), grammar=TEXT),
    NULL,
)

ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": either({"type": "string"}, NULL),
                "code": either({"type": "string"}, NULL),
            },
        }
    },
}
ANTHROPIC_ERROR: Schema = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
