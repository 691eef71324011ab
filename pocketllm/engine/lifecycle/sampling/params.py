"""How one request's tokens are chosen; validated once, when made."""

import math
from dataclasses import dataclass
from typing import Any

from pocketllm.errors import RequestError

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_REPETITION_PENALTY = 100.0
FRACTIONS = (
    "temperature",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request. Raises RequestError naming the field for anything that cannot be honored.

    `stop` may be one text and `stop_token_ids` any sequence; both are kept as tuples, and so is `logit_bias`, a mapping
    of token id to what is added to its logit. temperature 0 is greedy. top_k 0 or -1, top_p 1, min_p 0 and typical_p 1
    switch the filter off; repetition_penalty 1 and the other penalties 0 do nothing. seed None draws a fresh one.
    max_tokens may be 0 with prompt_logprobs: nothing is drawn then.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """How many alternatives to report with each token, 0…20; None reports nothing."""
    prompt_logprobs: int | None = None
    """The same for every token of the prompt but its first; the prefix cache is then not read."""

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):
            object.__setattr__(self, name, as_tuple(name, getattr(self, name)))
        object.__setattr__(self, "logit_bias", as_pairs(self.logit_bias))
        self._check_types()
        least = 1 if self.prompt_logprobs is None else 0
        if self.max_tokens is not None and self.max_tokens < least:
            raise RequestError(f"max_tokens={self.max_tokens} must be at least {least}", param="max_tokens")
        self._in_range("temperature", self.temperature, 0.0, 100.0)
        self._in_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        self._in_range("min_p", self.min_p, 0.0, 1.0)
        self._in_range("typical_p", self.typical_p, 0.0, 1.0, open_low=True)
        self._in_range("repetition_penalty", self.repetition_penalty, 0.0, MAX_REPETITION_PENALTY, open_low=True)
        self._in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        self._in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        if self.top_k < -1:
            raise RequestError(f"top_k={self.top_k} must be -1, 0 (off) or positive", param="top_k")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and not 0 <= count <= MAX_LOGPROBS:
                raise RequestError(f"{name}={count} must be between 0 and {MAX_LOGPROBS}", param=name)
        self._check_stops()

    @property
    def is_greedy(self) -> bool:
        return self.temperature <= 1e-5

    def _in_range(self, name: str, value: float, low: float, high: float, open_low: bool = False) -> None:
        if not math.isfinite(value) or value < low or value > high or (open_low and value == low):
            bracket = "(" if open_low else "["
            raise RequestError(f"{name}={value} must be in {bracket}{low:g}, {high:g}]", param=name)

    def _check_types(self) -> None:
        """A float is not taken for a whole number, nor a bool for either."""
        kinds: dict[str, tuple[type, ...]] = dict.fromkeys(FRACTIONS, (int, float))
        kinds |= dict.fromkeys(("max_tokens", "top_k", "seed", "logprobs", "prompt_logprobs"), (int,))
        for name, accepted in kinds.items():
            value = getattr(self, name)
            is_open = value is None and name in ("max_tokens", "seed", "logprobs", "prompt_logprobs")
            if not is_open and (isinstance(value, bool) or not isinstance(value, accepted)):
                what = "a whole number" if accepted == (int,) else "a number"
                raise RequestError(f"{name}={value!r} is not {what}", param=name)
            if isinstance(value, int) and not -(2**63) <= value < 2**64:
                # of thousands of digits, it could neither be compared with a float nor be written into a message
                raise RequestError(f"{name} must fit 64 bits", param=name)
        for name, items, kind in (("stop", self.stop, str), ("stop_token_ids", self.stop_token_ids, int)):
            for item in items:
                if isinstance(item, bool) or not isinstance(item, kind):
                    raise RequestError(f"{name} has {item!r}, which is not a {kind.__name__}", param=name)

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"stop has {len(self.stop)} strings, the limit is {MAX_STOP_STRINGS}", param="stop")
        for text in self.stop:
            if not 0 < len(text) <= MAX_STOP_LENGTH:
                raise RequestError(f"a stop string must have 1 to {MAX_STOP_LENGTH} characters", param="stop")
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise RequestError(f"stop string {text!r} is not valid Unicode", param="stop")


def as_tuple(name: str, value: object) -> tuple[Any, ...]:
    """A list of stops as a tuple; None is none, and one text is one of them. RequestError for anything else."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list | tuple):
        return tuple(value)
    raise RequestError(f"{name}={value!r} is not a list", param=name)


def as_pairs(value: object) -> tuple[tuple[int, float], ...]:
    """A mapping of token ids to biases, or such pairs, as pairs by ascending id; RequestError for anything else."""
    if not value:
        return ()
    try:
        pairs = dict(value)  # type: ignore[call-overload]  # what is no mapping is refused
    except (TypeError, ValueError) as error:
        raise RequestError("logit_bias must map token ids to numbers", param="logit_bias") from error
    if len(pairs) > MAX_LOGIT_BIASES:
        raise RequestError(f"logit_bias has {len(pairs)} tokens, the limit is {MAX_LOGIT_BIASES}", param="logit_bias")
    for token_id, bias in pairs.items():
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise RequestError(f"logit_bias: token id {token_id!r} is not an integer", param="logit_bias")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            raise RequestError(
                f"logit_bias of token {token_id} must be a number from {-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}",
                param="logit_bias",
            )
    return tuple(sorted((token_id, float(bias)) for token_id, bias in pairs.items()))
