"""The OpenAPI description of this server, made from the models that read the bodies, with every bound they keep."""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from typing import Any

from pydantic.json_schema import models_json_schema

from pocketllm.engine.lifecycle.sampling import params
from pocketllm.engine.serving import protocol
from pocketllm.engine.serving.apis import messages_body, responses_body, text_routes
from pocketllm.engine.serving.apis.openapi_parts import (
    ANTHROPIC_ERROR,
    ERROR,
    MESSAGE,
    NULL,
    RESPONSE_FORMAT,
    STRUCTURED_OUTPUTS,
    TOOL_CHOICE,
    TOOLS,
    Schema,
    either,
)
from pocketllm.engine.serving.protocol import INERT, NEUTRAL, ChatBody, CompletionBody

TOKEN_ID: Schema = {"type": "integer", "minimum": 0}


def texts(most: int, longest: int) -> Schema:
    """A list of bounded texts."""
    return {"type": "array", "maxItems": most, "items": {"type": "string", "minLength": 1, "maxLength": longest}}


PROMPT = either(
    {"type": "string", "minLength": 1},
    {"type": "array", "minItems": 1, "items": TOKEN_ID},
    {
        "type": "array",
        "minItems": 1,
        "maxItems": protocol.MAX_PROMPTS,
        "items": either({"type": "string", "minLength": 1}, {"type": "array", "minItems": 1, "items": TOKEN_ID}),
    },
)
STOP = texts(*params.TEXTS["stop"])
BIAS: Schema = {
    "type": "object",
    "maxProperties": params.MAX_LOGIT_BIASES,
    "propertyNames": {"pattern": f"^[0-9]{{1,{protocol.MAX_ID_DIGITS}}}$"},
    "additionalProperties": {"type": "number", "minimum": -params.MAX_LOGIT_BIAS, "maximum": params.MAX_LOGIT_BIAS},
}
SPECIAL: Mapping[str, Schema] = {
    "prompt": PROMPT,
    "stop": either(STOP, STOP["items"], NULL),
    "logit_bias": either(BIAS, NULL),
    "stop_token_ids": either({"type": "array", "maxItems": protocol.MAX_STOP_TOKEN_IDS, "items": TOKEN_ID}, NULL),
    "allowed_token_ids": either({"type": "array", "items": TOKEN_ID, "minItems": 1}, NULL),
    "cache_salt": either({"type": "string", "minLength": 1, "maxLength": protocol.MAX_CACHE_SALT}, NULL),
    "n": either({"type": "integer", "minimum": 1, "maximum": protocol.MAX_CHOICES}, NULL),
    "tools": TOOLS,
    "tool_choice": TOOL_CHOICE,
    "response_format": RESPONSE_FORMAT,
    "structured_outputs": STRUCTURED_OUTPUTS,
    "mirostat": {"enum": [0, 2, None]},
    "seed": either({"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1}, NULL),
    "max_tokens": either({"type": "integer", "minimum": 0}, NULL),
    "max_completion_tokens": either({"type": "integer", "minimum": 0}, NULL),
} | {
    name: either({"type": "integer", "minimum": 0, "maximum": params.MAX_LOGPROBS}, NULL)
    for name in ("prompt_logprobs", "top_logprobs")
}
"""Fields whose reader takes more, or less, than their Python type says."""


def bounded(name: str, schema: Schema) -> Schema:
    """A field's schema with the bounds that are kept."""
    if name in SPECIAL:
        return dict(SPECIAL[name])
    if name in params.RANGES:
        low, high, is_open = params.RANGES[name]
        return either({"type": "number", "exclusiveMinimum" if is_open else "minimum": low, "maximum": high}, NULL)
    if name in params.LEAST:
        return either({"type": "integer", "minimum": params.LEAST[name]}, NULL)
    if name in ("bad_words", "dry_sequence_breakers"):
        return either(texts(*params.TEXTS[name]), NULL)
    return {key: value for key, value in schema.items() if key not in ("title", "default")}


def finished(name: str, schema: Schema) -> Schema:
    """A body's schema with its bounds, and with what becomes of fields it does not name."""
    if name == "Message":
        return MESSAGE
    schema = {key: value for key, value in schema.items() if key != "title"}
    if "properties" not in schema:
        return schema
    found = {field: bounded(field, inner) for field, inner in schema["properties"].items()}
    if name == "CompletionBody":
        found["logprobs"] = SPECIAL["top_logprobs"]
    if name in ("ChatBody", "CompletionBody", "TokenizeChat"):
        known = {field: {"enum": [*values, None]} for field, values in NEUTRAL.items() if field not in found}
        found = {field: {} for field in sorted(INERT)} | known | found
    if name in ("ChatBody", "TokenizeChat"):
        found["messages"] = found["messages"] | {"minItems": 1}
    open_names = ("ResponsesBody", "MessagesBody", "CountBody")
    return schema | {"properties": found, "additionalProperties": True if name in open_names else NULL}


BODIES = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": responses_body.ResponsesBody,
    "/v1/messages": messages_body.MessagesBody,
    "/v1/messages/count_tokens": messages_body.CountBody,
    "/tokenize": text_routes.TokenizeText,
    "/detokenize": text_routes.DetokenizeBody,
    "/apply-template": text_routes.TokenizeChat,
}
"""Address → what reads its body."""

STREAMED = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
PLAIN = {
    "/v1/models": "the models that are served",
    "/v1/models/{id}": "one of them",
    "/health": "whether the process lives",
    "/ready": "whether requests are taken",
    "/metrics": "Prometheus' text format",
    "/status": "what runs, and the last requests without their texts",
    "/openapi.json": "this description",
    "/": "a page for people",
}
ERRORS = {
    "400": "the body cannot be served as asked",
    "401": "an API key is asked for",
    "403": "a Host header or a web page that is not answered",
    "404": "no such model, route or request",
    "408": "the body did not come in time",
    "413": "the body is too large",
    "415": "the body is compressed",
    "500": "the engine failed",
    "503": "the queue is full, the model is loading, or the server drains; with Retry-After",
}


def answers(path: str) -> Schema:
    """The responses of one address."""
    shape = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    failure = {"application/json": {"schema": {"$ref": f"#/components/schemas/{shape}"}}}
    found: Schema = {status: {"description": text, "content": failure} for status, text in ERRORS.items()}
    if path in BODIES or path.startswith(("/v1/", "/status", "/openapi", "/reset", "/health")):
        content: Schema = {"application/json": {"schema": {"type": "object"}}}
    else:
        content = {"text/html" if path == "/" else "text/plain": {"schema": {"type": "string"}}}
    if path == "/ready":
        content = {"application/json": {"schema": {"type": "object"}}}
        found["503"] = {"description": "loading or draining", "content": content}
    if path in STREAMED:
        content = content | {"text/event-stream": {"schema": {"type": "string"}}}
    return {"200": {"description": "the answer", "content": content}} | found


def operation(path: str, text: str) -> Schema:
    """One address and method."""
    found: Schema = {"summary": text, "responses": answers(path), "operationId": operation_id(path)}
    if path in BODIES:
        schema = {"$ref": f"#/components/schemas/{BODIES[path].__name__}"}
        if path == "/tokenize":
            schema = either(schema, {"$ref": "#/components/schemas/TokenizeChat"})
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if "{id}" in path:
        found["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    return found


def operation_id(path: str) -> str:
    """A name for generated clients."""
    return path.strip("/").replace("{", "").replace("}", "").replace(".", "_").replace("/", "_") or "page"


@cache
def openapi_document() -> Schema:
    """The whole description, OpenAPI 3.1."""
    models = {*BODIES.values(), text_routes.TokenizeChat}
    wanted: Any = [(model, "validation") for model in sorted(models, key=lambda model: model.__name__)]
    _, schema = models_json_schema(wanted, ref_template="#/components/schemas/{model}")
    schemas = {name: finished(name, inner) for name, inner in schema["$defs"].items()}
    schemas |= {"Error": ERROR, "AnthropicError": ANTHROPIC_ERROR}
    paths: Schema = {path: {"post": operation(path, (model.__doc__ or "").strip())} for path, model in BODIES.items()}
    paths |= {path: {"get": operation(path, text)} for path, text in PLAIN.items()}
    paths["/reset_prefix_cache"] = {"post": operation("/reset_prefix_cache", "forget what was computed until now")}
    cancel = "/v1/requests/{id}/cancel"
    paths[cancel] = {"post": operation(cancel, "end a running request, by its X-Request-Id or its answer's id")}
    keys = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "pocketllm", "version": version("pocketllm")},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": keys},
        "security": [{}, {"bearer": []}, {"header": []}],
    }
