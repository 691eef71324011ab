"""A golden fixture: a case (one real request, reviewed like code) and one answer for each hard key; pure.

`records/fixtures/<checkpoint>/<case>.json` is the case; `<case>.<device kind>-<backend>.json` beside it is an answer.
Reading is strict: whatever a hand has broken is a RecordError that names the file and the key.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from pocketllm.engine.lifecycle.sampling.params import SamplingParams
from pocketllm.errors import RequestError
from pocketllm.golden.fields import Fields

SCHEMA = 1
TOP_LOGPROBS = 20

HTTP_ENTRY_POINTS = ("http_chat", "http_completions")
ENTRY_POINTS = ("in_process", "generate", *HTTP_ENTRY_POINTS)
KINDS = ("chat", "completion")
FINISH_REASONS = ("stop", "length")
SAMPLING_KEYS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
)


@dataclass(frozen=True, order=True)
class ServedPath:
    """One way to ask: entry point, streamed or not, and how many requests are in flight beside it and with it.

    Written `http_chat`, `http_chat:stream`, `http_chat:stream@2`.
    """

    entry_point: str
    is_stream: bool = False
    concurrency: int = 1

    def __str__(self) -> str:
        stream = ":stream" if self.is_stream else ""
        return f"{self.entry_point}{stream}" + (f"@{self.concurrency}" if self.concurrency > 1 else "")

    @property
    def is_http(self) -> bool:
        return self.entry_point in HTTP_ENTRY_POINTS

    @classmethod
    def parse(cls, text: str) -> "ServedPath":
        """Read the written form; ValueError says what is wrong with it."""
        head, _, width = text.partition("@")
        name, _, mode = head.partition(":")
        if name not in ENTRY_POINTS:
            raise ValueError(f"{text!r} is no entry point; known: {', '.join(ENTRY_POINTS)}")
        if mode not in ("", "stream"):
            raise ValueError(f"{text!r}: after `:` only `stream` may stand")
        if "@" in text and width not in ("1", "2"):
            raise ValueError(f"{text!r}: concurrency is 1 or 2")
        path = cls(name, mode == "stream", int(width or "1"))
        if not path.is_http and (path.is_stream or path.concurrency > 1):
            raise ValueError(f"{text!r}: only the http entry points are streamed or asked two at a time")
        return path


@dataclass(frozen=True)
class HardKey:
    """What must be equal before a recorded answer may be used at all; sha256 digests are of content, never of paths."""

    device_kind: str
    backend: str
    numerics_version: str
    quant_types: tuple[str, ...]
    weights_sha256: str
    tokenizer_sha256: str

    @property
    def label(self) -> str:
        """The part that names the answer's file: the device, and the backend where it is not the device's own."""
        return self.device_kind if self.backend == self.device_kind else f"{self.device_kind}-{self.backend}"

    def differences(self, other: "HardKey") -> tuple[str, ...]:
        """One clause a field in which `other` (the engine at hand) differs from this recorded key."""
        clauses = []
        for item in fields(self):
            recorded, present = getattr(self, item.name), getattr(other, item.name)
            if recorded != present:
                clauses.append(f"{item.name} {_short(recorded)} recorded, {_short(present)} here")
        return tuple(clauses)


def _short(value: str | tuple[str, ...]) -> str:
    text = "+".join(value) if isinstance(value, tuple) else value
    return text[:12] if len(text) == 64 else text


@dataclass(frozen=True)
class Case:
    """One request as a client sends it, and the prompt it must become."""

    name: str
    purpose: str
    kind: Literal["chat", "completion"]
    messages: tuple[Mapping[str, str], ...]
    prompt: str
    sampling: Mapping[str, Any]
    paths: tuple[ServedPath, ...]
    template_sha256: str | None
    rendered_sha256: str
    prompt_token_ids: tuple[int, ...]

    @property
    def is_greedy(self) -> bool:
        return self.params().is_greedy

    @property
    def request_sha256(self) -> str:
        """Digest of all that decides the answer: an answer belongs to one request, not to a file name."""
        asked = [self.kind, [dict(m) for m in self.messages], self.prompt, dict(self.sampling), self.prompt_token_ids]
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()

    def params(self, logprobs: int | None = None) -> SamplingParams:
        """The sampling fields as the engine takes them."""
        return make_params({**self.sampling, "logprobs": logprobs})


@dataclass(frozen=True)
class Position:
    """One output position at record time: natural logprobs of the unmodified distribution, most likely first."""

    logprob: float
    margin: float
    """lp of the most likely token less lp of the next one."""
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]

    def top_logprob(self, token_id: int | None) -> float | None:
        """Logprob of a token, None when it is outside the recorded top."""
        for top_id, logprob in zip(self.top_ids, self.top_logprobs, strict=True):
            if top_id == token_id:
                return logprob
        return None


@dataclass(frozen=True)
class Expected:
    """What must come back."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True)
class Answer:
    """One recorded answer, valid for its hard key alone."""

    case: str
    request_sha256: str
    hard_key: HardKey
    expected: Expected
    positions: tuple[Position, ...]
    repeats: int
    is_bit_identical: bool
    soft: Mapping[str, Any]
    """Facts that may differ without harm: CPU, instruction set, versions."""
    provenance: Mapping[str, Any]
    """Command, when, commit, dirty, reason."""

    @property
    def smallest_margin(self) -> float:
        return min((position.margin for position in self.positions), default=math.inf)


def make_params(sampling: Mapping[str, Any]) -> SamplingParams:
    """JSON sampling fields as SamplingParams; RequestError or TypeError for what it cannot take."""
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in sampling.items()
    }
    return SamplingParams(**values)


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
    )
    check_paths(file, case)
    file.end()
    return case


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
    file.literal("schema", SCHEMA)
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
    noise = file.child("noise", file.object("noise"))
    answer = Answer(
        case=name,
        request_sha256=str(file.digest("request_sha256")),
        hard_key=hard_key,
        expected=_expected(file.child("expected", file.object("expected"))),
        positions=tuple(_position(file.child("positions", item)) for item in file.objects("positions")),
        repeats=noise.integer("repeats"),
        is_bit_identical=noise.boolean("bit_identical"),
        soft=file.object("soft"),
        provenance=file.object("provenance"),
    )
    noise.end()
    file.number("smallest_margin", optional=True)  # written for the reader of the file, computed by us
    if len(answer.positions) != len(answer.expected.token_ids):
        raise file.error("positions", "must have one entry for each of expected.token_ids")
    file.end()
    return answer


def _expected(item: Fields) -> Expected:
    usage = item.child("usage", item.object("usage"))
    expected = Expected(
        token_ids=item.ids("token_ids"),
        text=item.text("text", empty=True),
        finish_reason=item.choice("finish_reason", FINISH_REASONS),
        num_prompt_tokens=usage.integer("prompt_tokens"),
        num_output_tokens=usage.integer("completion_tokens"),
    )
    usage.end()
    item.end()
    if expected.num_output_tokens != len(expected.token_ids):
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
        **({"template_sha256": case.template_sha256} if case.template_sha256 else {}),
        "rendered_sha256": case.rendered_sha256,
        "prompt_token_ids": list(case.prompt_token_ids),
    }


def answer_document(answer: Answer) -> dict[str, Any]:
    """An answer as it is written, in this order."""
    expected = answer.expected
    return {
        "schema": SCHEMA,
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
        "smallest_margin": answer.smallest_margin,
        "noise": {"repeats": answer.repeats, "bit_identical": answer.is_bit_identical},
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
