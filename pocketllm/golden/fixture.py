"""A golden fixture: a case (one real request, reviewed like code) and one answer for each hard key; pure.

`records/fixtures/<checkpoint>/<case>.json` is the case; `<case>.<device kind>-<backend>.json` beside it is an answer.
`fixture_json` reads and writes them.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from pocketllm.engine.lifecycle.sampling.params import SamplingParams

HTTP_ENTRY_POINTS = ("http_chat", "http_completions")
ENTRY_POINTS = ("in_process", "generate", *HTTP_ENTRY_POINTS)
MODES = ("stream", "warm")
MAX_CONCURRENCY = 8
TOP_LOGPROBS = 20
URL_DEVICE = "url"
"""Device kind of an answer that another engine gave at a URL."""
TAGS = ("tie-probe",)
"""tie-probe: the case is there for its small margin, and may have one."""

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
    """One way to ask: entry point, streamed or not, how many requests are in flight at once, warm cache or not.

    Written `http_chat`, `http_chat:stream`, `http_chat:stream@2`, `http_chat:warm`.
    """

    entry_point: str
    is_stream: bool = False
    concurrency: int = 1
    is_warm: bool = False
    """Whether the beginning of the prompt is asked for first, so that it must come from the prefix cache."""

    def __str__(self) -> str:
        modes = f"{':stream' * self.is_stream}{':warm' * self.is_warm}"
        return f"{self.entry_point}{modes}" + (f"@{self.concurrency}" if self.concurrency > 1 else "")

    @property
    def is_http(self) -> bool:
        return self.entry_point in HTTP_ENTRY_POINTS

    @classmethod
    def parse(cls, text: str) -> "ServedPath":
        """Read the written form; ValueError says what is wrong with it."""
        head, _, width = text.partition("@")
        name, *modes = head.split(":")
        if name not in ENTRY_POINTS:
            raise ValueError(f"{text!r} is no entry point; known: {', '.join(ENTRY_POINTS)}")
        if set(modes) - set(MODES) or len(set(modes)) != len(modes):
            raise ValueError(f"{text!r}: after `:` only `stream` and `warm` may stand, each once")
        if "@" in text and not (width.isascii() and width.isdecimal() and 1 <= int(width) <= MAX_CONCURRENCY):
            raise ValueError(f"{text!r}: concurrency is 1 to {MAX_CONCURRENCY}")
        path = cls(name, "stream" in modes, int(width or "1"), "warm" in modes)
        if not path.is_http and (path.is_stream or path.concurrency > 1):
            raise ValueError(f"{text!r}: only the http entry points are streamed or asked several at a time")
        if path.is_warm and (path.concurrency > 1 or path.entry_point == "generate"):
            raise ValueError(f"{text!r}: a warm cache is asked for one at a time, and not of a process that ends")
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
        """The part that names the answer's file: the device, and the backend where it is not the device's own.

        >>> HardKey("cuda:NVIDIA H200", "cuda", "1", (), "", "").label
        'cuda-nvidia-h200'
        """
        is_own = self.backend == self.device_kind.partition(":")[0]
        name = self.device_kind if is_own else f"{self.device_kind}-{self.backend}"
        return re.sub(r"[^a-z0-9._]+", "-", name.lower()).strip("-")

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
    tags: tuple[str, ...] = ()
    """Any of TAGS."""

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
    """None at all where the recorded engine shows no token ids: then the text is what must come back."""
    text: str
    finish_reason: str
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True)
class Floor:
    """How far the same logprobs came apart without a change of the numerics: of |Δlogprob|, in nat."""

    mean: float
    p99: float


@dataclass(frozen=True)
class Noise:
    """What repeating and varying the request did to its logprobs when it was recorded."""

    repeats: int
    is_bit_identical: bool
    variations: tuple[str, ...] = ()
    """What was varied within the hard key: threads, chunks, neighbors, a warm cache, scoring instead of decoding."""
    floor: Floor = Floor(0.0, 0.0)
    """Over all of them together."""
    reference: Floor | None = None
    """The distance to the reference backend: rounding that another order of additions may turn over."""


@dataclass(frozen=True)
class Answer:
    """One recorded answer, valid for its hard key alone."""

    case: str
    request_sha256: str
    hard_key: HardKey
    expected: Expected
    positions: tuple[Position, ...]
    """One for each of `expected.token_ids`; none where the recorded engine shows no logprobs."""
    noise: Noise
    soft: Mapping[str, Any]
    """Facts that may differ without harm: CPU, instruction set, versions."""
    provenance: Mapping[str, Any]
    """Command, when, commit, dirty, run record, reason."""

    @property
    def smallest_margin(self) -> float:
        return min((position.margin for position in self.positions), default=math.inf)


def make_params(sampling: Mapping[str, Any]) -> SamplingParams:
    """JSON sampling fields as SamplingParams; RequestError or TypeError for what it cannot take."""
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in sampling.items()
    }
    return SamplingParams(**values)
