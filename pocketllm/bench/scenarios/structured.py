"""The same request with and without a JSON schema that its answer must obey."""

from pocketllm.bench.scenarios.contract import Need, Point, Scenario

ENTRY = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "year": {"type": "integer"}, "known": {"type": "boolean"}},
    "required": ["name", "year", "known"],
    "additionalProperties": False,
}
# too many entries for the tokens that are asked for: whatever a model says, its answer is as long without the schema
SCHEMA = {
    "type": "object",
    "properties": {"entries": {"type": "array", "items": ENTRY, "minItems": 16}},
    "required": ["entries"],
    "additionalProperties": False,
}

SCENARIO = Scenario(
    name="structured",
    about="128 tokens in, 64 out, without and with a JSON schema, one request at a time",
    point_words="with the schema {}",
    n_prompt=128,
    n_out=64,
    judged=("tpot",),
    shown=("ttft",),
    points=(Point("off"), Point("on", json_schema=SCHEMA)),
    needs=frozenset({Need.STRUCTURED}),
)
