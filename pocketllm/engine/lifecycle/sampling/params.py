"""How one request's tokens are chosen; validated once, when made."""

import math
from dataclasses import dataclass
from typing import Any

from pocketllm.engine.chat_formats.markup import Markup
from pocketllm.engine.structured.constraint import Constraint
from pocketllm.errors import RequestError

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MIN_REPETITION_PENALTY = 0.01
"""Logits are divided by it: by much less they would no longer be finite."""
MAX_REPETITION_PENALTY = 100.0
MAX_WORDS = 128
"""Most `bad_words`, and most `dry_sequence_breakers`."""
MAX_WORD_LENGTH = 128
RANGES: dict[str, tuple[float, float, bool]] = {
    "temperature": (0.0, 100.0, False),
    "top_p": (0.0, 1.0, True),
    "min_p": (0.0, 1.0, False),
    "typical_p": (0.0, 1.0, True),
    "xtc_probability": (0.0, 1.0, False),
    "xtc_threshold": (0.0, 1.0, False),
    "repetition_penalty": (MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY, False),
    "frequency_penalty": (-2.0, 2.0, False),
    "presence_penalty": (-2.0, 2.0, False),
    "dry_multiplier": (0.0, 100.0, False),
    "dry_base": (1.0, 100.0, False),
    "mirostat_tau": (0.0, 100.0, True),
    "mirostat_eta": (0.0, 1.0, True),
}
"""Fractions: least, most, and whether the least itself is left out."""
LEAST: dict[str, int] = {"top_k": -1, "min_tokens": 0, "dry_allowed_length": 1, "dry_penalty_last_n": -1}
"""Whole numbers that only have a least."""
OPTIONAL = ("max_tokens", "seed", "logprobs", "prompt_logprobs")
TEXTS = {
    "stop": (MAX_STOP_STRINGS, MAX_STOP_LENGTH),
    "bad_words": (MAX_WORDS, MAX_WORD_LENGTH),
    "dry_sequence_breakers": (MAX_WORDS, MAX_WORD_LENGTH),
}
"""Lists of texts: most entries, and most characters of one."""
ALIKE_TO_MIROSTAT = {"top_k": (0, -1), "top_p": (1.0,), "min_p": (0.0,), "typical_p": (1.0,), "xtc_probability": (0.0,)}
"""Filters that mirostat stands in for, with the values that switch them off."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request. Raises RequestError naming the field for anything that cannot be honored.

    `stop`, `bad_words` and `dry_sequence_breakers` may be one text, and lists of ids any sequence; all are kept as
    tuples, and so is `logit_bias`, a mapping of token id to what is added to its logit. temperature 0 is greedy.
    top_k 0 or -1, top_p 1, min_p 0, typical_p 1 and xtc_probability 0 switch the filter off; repetition_penalty 1 and
    the other penalties 0 do nothing. seed None draws a fresh one. max_tokens may be 0 with prompt_logprobs: nothing is
    drawn then.

    Semantics are vLLM's for penalties, `logit_bias`, `min_tokens`, `bad_words` and `allowed_token_ids`, and llama.cpp's
    for DRY, XTC and mirostat; each processor's module says them.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    mirostat: int = 0
    """0 is off, 2 is mirostat v2; it takes the place of all filters above."""
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    dry_multiplier: float = 0.0
    """0 is off."""
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    """Tokens that are looked back on; -1 is all of prompt and answer."""
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    """Texts that the answer does not hold, as their own tokens."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that may be drawn; none given: all may."""
    seed: int | None = None
    min_tokens: int = 0
    """Tokens before which neither an end token, nor one of `stop_token_ids`, nor a stop string ends the answer."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    """Whether the text ends with the stop string, or with the text of the stop token, that ended it."""
    ignore_eos: bool = False
    logprobs: int | None = None
    """How many alternatives to report with each token, 0…20; None reports nothing."""
    prompt_logprobs: int | None = None
    """The same for every token of the prompt but its first; the prefix cache is then not read."""
    constraint: Constraint | None = None
    """What the answer must obey. A stop string or the token limit may cut it short; stop tokens end it only where the
    grammar lets it end, with `ignore_eos` only where nothing else may follow."""
    markup: Markup | None = None
    """Control tokens that stay in the text, and the thought inside which stop strings do not count."""

    def __post_init__(self) -> None:
        for name in (*TEXTS, "stop_token_ids", "allowed_token_ids"):
            object.__setattr__(self, name, as_tuple(name, getattr(self, name)))
        object.__setattr__(self, "logit_bias", as_pairs(self.logit_bias))
        self._check_types()
        for name, (low, high, is_open) in RANGES.items():
            self._in_range(name, getattr(self, name), low, high, is_open)
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                off = " (off)" if name == "top_k" else ""
                raise RequestError(f"{name}={getattr(self, name)} must be at least {least}{off}", param=name)
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and not 0 <= count <= MAX_LOGPROBS:
                raise RequestError(f"{name}={count} must be between 0 and {MAX_LOGPROBS}", param=name)
        if not isinstance(self.constraint, Constraint | None):
            raise RequestError(
                f"constraint is a {type(self.constraint).__name__}: make it with engine.structured.constraint",
                param="constraint",
            )
        self._check_lengths()
        self._check_mirostat()
        for name, (most, longest) in TEXTS.items():
            check_texts(name, getattr(self, name), most, longest)

    @property
    def is_greedy(self) -> bool:
        return self.temperature <= 1e-5

    def _in_range(self, name: str, value: float, low: float, high: float, open_low: bool) -> None:
        if not math.isfinite(value) or value < low or value > high or (open_low and value == low):
            bracket = "(" if open_low else "["
            raise RequestError(f"{name}={value} must be in {bracket}{low:g}, {high:g}]", param=name)

    def _check_types(self) -> None:
        """A float is not taken for a whole number, nor a bool for either."""
        kinds: dict[str, tuple[type, ...]] = dict.fromkeys(RANGES, (int, float))
        kinds |= dict.fromkeys((*OPTIONAL, *LEAST, "mirostat"), (int,))
        for name, accepted in kinds.items():
            value = getattr(self, name)
            is_open = value is None and name in OPTIONAL
            if not is_open and (isinstance(value, bool) or not isinstance(value, accepted)):
                what = "a whole number" if accepted == (int,) else "a number"
                raise RequestError(f"{name}={value!r} is not {what}", param=name)
            if isinstance(value, int) and not -(2**63) <= value < 2**64:
                # of thousands of digits, it could neither be compared with a float nor be written into a message
                raise RequestError(f"{name} must fit 64 bits", param=name)
        lists = {**dict.fromkeys(TEXTS, str), "stop_token_ids": int, "allowed_token_ids": int}
        for name, kind in lists.items():
            for item in getattr(self, name):
                if isinstance(item, bool) or not isinstance(item, kind):
                    raise RequestError(f"{name} has {item!r}, which is not a {kind.__name__}", param=name)

    def _check_lengths(self) -> None:
        least = 1 if self.prompt_logprobs is None else 0
        if self.max_tokens is None:
            return
        if self.max_tokens < least:
            raise RequestError(f"max_tokens={self.max_tokens} must be at least {least}", param="max_tokens")
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}", param="min_tokens"
            )

    def _check_mirostat(self) -> None:
        if self.mirostat not in (0, 2):
            raise RequestError(f"mirostat={self.mirostat} must be 0 (off) or 2", param="mirostat")
        for name, off in ALIKE_TO_MIROSTAT.items():
            if self.mirostat and getattr(self, name) not in off:
                raise RequestError(f"mirostat takes the place of {name}: leave that out", param=name)


def check_texts(name: str, texts: tuple[str, ...], most: int, longest: int) -> None:
    """Raise RequestError for too many, and for one that is empty, too long or not valid Unicode."""
    if len(texts) > most:
        raise RequestError(f"{name} has {len(texts)} strings, the limit is {most}", param=name)
    for text in texts:
        if not 0 < len(text) <= longest:
            raise RequestError(f"{name}: a string must have 1 to {longest} characters", param=name)
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise RequestError(f"{name}: string {text!r} is not valid Unicode", param=name)


def as_tuple(name: str, value: object) -> tuple[Any, ...]:
    """A list as a tuple; None is none, and one text is one of them. RequestError for anything else."""
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
