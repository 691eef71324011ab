"""Fixture files as text: a case and an answer read strictly and written readably; pure.

Whatever a hand has broken is a RecordError that names the file and the key.
"""

from dataclasses import fields
from typing import Any

from pocketllm.errors import RequestError
from pocketllm.golden.files.fields import Fields
from pocketllm.golden.fixture import (
    SAMPLING_KEYS,
    TAGS,
    URL_DEVICE,
    Answer,
    Case,
    Expected,
    Floor,
    HardKey,
    Noise,
    Position,
    ServedPath,
    make_params,
)

SCHEMA = 1
ANSWER_SCHEMA = 2
"""2: the noise floor of an answer has its variations, mean and p99."""
KINDS = ("chat", "completion")
FINISH_REASONS = ("stop", "length")


def parse_case(text: str, where: str) -> Case:
    """Read a case file; raises RecordError naming `where` and the key."""
    file = Fields.of_text(text, where)
    file.literal("schema", SCHEMA)
    name, purpose = file.text("case"), file.text("purpose")
    kind = file.choice("kind", KINDS)
    messages = parse_messages(file, optional=kind != "chat")
    prompt = file.text("prompt") if kind == "completion" else ""
    if kind == "chat" and not messages:
        raise file.error("messages", "a chat needs at least one message")
    case = Case(
        name=name,
        purpose=purpose,
        kind="chat" if kind == "chat" else "completion",
        messages=messages,
        prompt=prompt,
        sampling=parse_sampling(file.child("sampling", file.object("sampling"))),
        paths=tuple(parse_path(file, text) for text in file.texts("paths")),
        template_sha256=file.digest("template_sha256", optional=kind != "chat"),
        rendered_sha256=str(file.digest("rendered_sha256")),
        prompt_token_ids=file.ids("prompt_token_ids"),
        tags=parse_tags(file),
    )
    check_paths(file, case)
    file.end()
    return case


def parse_tags(file: Fields) -> tuple[str, ...]:
    """The tags of a case, all of them known; RecordError names the key."""
    tags = tuple(file.texts("tags")) if file.has("tags") else ()
    unknown = sorted(set(tags) - set(TAGS))
    if unknown:
        raise file.error("tags", f"{unknown[0]!r} is no tag; known: {', '.join(TAGS)}")
    return tags


def parse_path(file: Fields, text: str) -> ServedPath:
    """A written path; RecordError names the key."""
    try:
        return ServedPath.parse(text)
    except ValueError as error:
        raise file.error("paths", str(error)) from error


def check_paths(file: Fields, case: Case) -> None:
    """Every path must be one that this kind of request can take."""
    if not case.paths:
        raise file.error("paths", "names no entry point: nothing would be checked")
    if len(set(case.paths)) != len(case.paths):
        raise file.error("paths", "names an entry point twice")
    wrong = "http_completions" if case.kind == "chat" else "http_chat"
    if any(path.entry_point == wrong for path in case.paths):
        raise file.error("paths", f"a {case.kind} case cannot go through {wrong}")
    if any(path.entry_point == "generate" for path in case.paths):
        if case.kind == "chat" and (len(case.messages) > 1 or case.messages[0]["role"] != "user"):
            raise file.error("paths", "`generate --chat` takes one user message, this case has others")
        if "stop_token_ids" in case.sampling:
            raise file.error("paths", "`generate` has no stop_token_ids: leave this case to the other entry points")


def parse_messages(file: Fields, optional: bool) -> tuple[dict[str, str], ...]:
    """The messages of a case, none where they may be absent; RecordError names the key."""
    return tuple(_message(file.child("messages", item)) for item in file.objects("messages", optional))


def _message(item: Fields) -> dict[str, str]:
    message = {"role": item.text("role"), "content": item.text("content")}
    item.end()
    return message


def parse_sampling(item: Fields) -> dict[str, Any]:
    """The sampling fields of a case: explicit length and temperature, and a seed where one is drawn from."""
    values = item.rest(SAMPLING_KEYS)
    for key in ("max_tokens", "temperature"):
        if key not in values:
            raise item.error(key, "is missing: a golden leaves nothing to a default that may change")
    try:
        params = make_params(values)
    except RequestError as error:
        raise item.error(error.param or "", str(error)) from error
    except TypeError as error:
        raise item.error("", f"has a value of the wrong type ({error})") from error
    if not params.is_greedy and params.seed is None:
        raise item.error("seed", "is missing: a sampled case without one has no answer to compare with")
    return values


def parse_answer(text: str, where: str) -> Answer:
    """Read an answer file; raises RecordError naming `where` and the key."""
    file = Fields.of_text(text, where)
    file.literal("schema", ANSWER_SCHEMA)
    name = file.text("case")
    key = file.child("hard_key", file.object("hard_key"))
    hard_key = HardKey(
        device_kind=key.text("device_kind"),
        backend=key.text("backend"),
        numerics_version=key.text("numerics_version"),
        quant_types=tuple(key.texts("quant_types")),
        weights_sha256=str(key.digest("weights_sha256")),
        tokenizer_sha256=str(key.digest("tokenizer_sha256")),
    )
    key.end()
    answer = Answer(
        case=name,
        request_sha256=str(file.digest("request_sha256")),
        hard_key=hard_key,
        expected=_expected(file.child("expected", file.object("expected"))),
        positions=tuple(_position(file.child("positions", item)) for item in file.objects("positions")),
        noise=_noise(file.child("noise", file.object("noise"))),
        soft=file.object("soft"),
        provenance=file.object("provenance"),
    )
    file.number("smallest_margin", optional=True)  # written for the reader of the file, computed by us
    if answer.positions and len(answer.positions) != len(answer.expected.token_ids):
        raise file.error("positions", "must have one entry for each of expected.token_ids, or none")
    if not answer.positions and hard_key.device_kind != URL_DEVICE:
        raise file.error("positions", "is empty: only an answer of a server at a URL may be without logprobs")
    file.end()
    return answer


def _noise(item: Fields) -> Noise:
    noise = Noise(
        repeats=item.integer("repeats"),
        is_bit_identical=item.boolean("bit_identical"),
        variations=tuple(item.texts("variations")),
        floor=_floor(item.child("floor", item.object("floor"))),
        reference=_floor(item.child("reference", item.object("reference"))) if item.has("reference") else None,
    )
    item.end()
    return noise


def _floor(item: Fields) -> Floor:
    floor = Floor(item.number("mean"), item.number("p99"))
    item.end()
    return floor


def _expected(item: Fields) -> Expected:
    usage = item.child("usage", item.object("usage"))
    expected = Expected(
        token_ids=item.ids("token_ids", empty=True),
        text=item.text("text", empty=True),
        finish_reason=item.choice("finish_reason", FINISH_REASONS),
        num_prompt_tokens=usage.integer("prompt_tokens"),
        num_output_tokens=usage.integer("completion_tokens"),
    )
    usage.end()
    item.end()
    if expected.token_ids and expected.num_output_tokens != len(expected.token_ids):
        raise item.error("token_ids", f"has {len(expected.token_ids)} ids, usage says {expected.num_output_tokens}")
    return expected


def _position(item: Fields) -> Position:
    position = Position(
        logprob=item.number("logprob"),
        margin=item.number("margin"),
        top_ids=item.ids("top_ids"),
        top_logprobs=item.numbers("top_logprobs"),
    )
    item.end()
    if len(position.top_ids) != len(position.top_logprobs):
        raise item.error("top_logprobs", "must be as long as top_ids")
    return position


def case_document(case: Case) -> dict[str, Any]:
    """A case as it is written, in this order."""
    request = {"messages": [dict(m) for m in case.messages]} if case.kind == "chat" else {"prompt": case.prompt}
    return {
        "schema": SCHEMA,
        "case": case.name,
        "purpose": case.purpose,
        "kind": case.kind,
        **request,
        "sampling": {key: case.sampling[key] for key in SAMPLING_KEYS if key in case.sampling},
        "paths": [str(path) for path in case.paths],
        **({"tags": list(case.tags)} if case.tags else {}),
        **({"template_sha256": case.template_sha256} if case.template_sha256 else {}),
        "rendered_sha256": case.rendered_sha256,
        "prompt_token_ids": list(case.prompt_token_ids),
    }


def answer_document(answer: Answer) -> dict[str, Any]:
    """An answer as it is written, in this order."""
    expected = answer.expected
    return {
        "schema": ANSWER_SCHEMA,
        "case": answer.case,
        "request_sha256": answer.request_sha256,
        "hard_key": {
            item.name: list(value) if isinstance(value := getattr(answer.hard_key, item.name), tuple) else value
            for item in fields(HardKey)
        },
        "expected": {
            "finish_reason": expected.finish_reason,
            "usage": {"prompt_tokens": expected.num_prompt_tokens, "completion_tokens": expected.num_output_tokens},
            "text": expected.text,
            "token_ids": list(expected.token_ids),
        },
        **({"smallest_margin": answer.smallest_margin} if answer.positions else {}),
        "noise": noise_document(answer.noise),
        "soft": dict(answer.soft),
        "provenance": dict(answer.provenance),
        "positions": [
            {
                "logprob": position.logprob,
                "margin": position.margin,
                "top_ids": list(position.top_ids),
                "top_logprobs": list(position.top_logprobs),
            }
            for position in answer.positions
        ],
    }


def noise_document(noise: Noise) -> dict[str, Any]:
    """The noise of an answer as it is written."""
    return {
        "repeats": noise.repeats,
        "bit_identical": noise.is_bit_identical,
        "variations": list(noise.variations),
        "floor": dict(vars(noise.floor)),
        **({"reference": dict(vars(noise.reference))} if noise.reference else {}),
    }
