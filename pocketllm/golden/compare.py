"""What was served against what was recorded; pure.

The served path comes first (status, prompt ids, then usage, finish reason and text), so that a changed template or
tokenizer is called that, and not a model that answers otherwise. Then token ids, then the logprobs behind equal ids.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from pocketllm.golden.fixture import Answer, Case, Noise, Position

LEAST_TAU = 2e-5
"""Nat. Fixtures keep five digits, and one last bit of a float32 logit near 32 is 2e-6: below this nothing is told."""
LARGEST_TAU = 0.05
"""Nat: a wider gap between two tokens is no tie, however noisy the record."""
LEAST_DRIFT = 1e-3
"""Nat: a smaller shift of the logprobs is not called one, however quiet the record."""


@dataclass(frozen=True)
class Observed:
    """What one entry point gave back; None where it does not say (a foreign server shows no ids)."""

    status: int = 200
    error: str = ""
    """The server's own words when the status is not 200, or what is wrong with the shape of a 200."""
    prompt_token_ids: tuple[int, ...] | None = None
    token_ids: tuple[int, ...] | None = None
    text: str = ""
    finish_reason: str | None = None
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    num_cached_tokens: int | None = None
    logprobs: tuple[float, ...] | None = None
    """Natural logprob of each of `token_ids`."""
    tops: tuple[tuple[tuple[int, float], ...], ...] | None = None
    """The likeliest (token id, logprob) at each position, where they were asked for and are shown."""
    ttft_s: float | None = None
    e2el_s: float | None = None


@dataclass(frozen=True)
class Identical:
    """The recorded answer came back; by its text, or by the scores of its tokens, where that is all that was asked."""

    scope: Literal["ids", "text", "scores"] = "ids"
    word = "IDENTICAL"


@dataclass(frozen=True)
class Tie:
    """Other tokens, each where the record itself says that two were as likely; the rest came back after each."""

    positions: tuple[int, ...]
    margin: float
    """The largest recorded lead among them, in nat."""
    regret: float
    """The most that one of the served tokens gave up, in nat."""
    tau: float
    """Nat up to which both count as nothing."""
    word = "TIE"


@dataclass(frozen=True)
class Regression:
    """Something else came back. `what` names the first thing that differs; position and margin belong to ids."""

    what: str
    detail: str
    position: int | None = None
    expected: int | None = None
    """Token id recorded at the position; None past the recorded end."""
    got: int | None = None
    margin: float | None = None
    """Recorded lead of the most likely token at the position, in nat."""
    regret: float | None = None
    """lp*(expected) - lp*(got) from the record, in nat; infinite when `got` is outside the recorded top."""
    word = "REGRESSION"


@dataclass(frozen=True)
class Drift:
    """The recorded tokens have other logprobs than recorded: the next change may turn one over."""

    shift: "Shift"
    limit: "Shift"
    """What mean and p99 may be: 3 × the recorded floor, at least LEAST_DRIFT."""
    word = "DRIFT"


@dataclass(frozen=True)
class Diverged:
    """Another answer that cannot be told from a tie: sampled, or from an entry point without ids or logprobs."""

    reason: str
    position: int | None = None
    expected: int | None = None
    got: int | None = None
    word = "DIVERGED"


@dataclass(frozen=True)
class Unrecorded:
    """There is no answer for this hard key."""

    reason: str
    word = "UNRECORDED"


@dataclass(frozen=True)
class NotJudged:
    """The instrument could not decide: never a pass."""

    reason: str
    word = "NOT JUDGED"


@dataclass(frozen=True)
class Stale:
    """A file of the fixture folder that no case refers to any more."""

    reason: str
    word = "STALE"


Outcome = Identical | Tie | Regression | Drift | Diverged | Unrecorded | NotJudged | Stale
WORDS = ("IDENTICAL", "TIE", "REGRESSION", "DRIFT", "DIVERGED", "UNRECORDED", "NOT JUDGED", "STALE")


@dataclass(frozen=True)
class Shift:
    """|Δlogprob| of the recorded tokens against the record, in nat."""

    mean: float
    p99: float


def compare(case: Case, answer: Answer, observed: Observed, unstreamed_text: str | None = None) -> Outcome:
    """Judge one observation; `unstreamed_text` is what the same request gave without streaming, where known.

    A Regression in `tokens` may still be a tie or undecidable: `ties.settle` asks on. Raises nothing: whatever cannot
    be compared is NotJudged.
    """
    if observed.status == 503:
        return NotJudged(f"the server is not ready or full: {observed.error or 'HTTP 503'}")
    if observed.status == 401:
        return NotJudged(f"HTTP 401: {observed.error}; give its key with --api-key")
    if observed.status == 404:  # a wrong --served-model or --url says nothing about the model
        return NotJudged(f"the server does not have this model or route: {observed.error or 'HTTP 404'}")
    if observed.status != 200:
        return Regression("status", f"HTTP {observed.status}: {observed.error}".rstrip(": "))
    if observed.error:
        return Regression("schema", observed.error)
    if observed.prompt_token_ids is not None and observed.prompt_token_ids != case.prompt_token_ids:
        return _prompt_regression(case, observed.prompt_token_ids)
    if unstreamed_text is not None and observed.text != unstreamed_text:
        return Regression("stream text", f"streamed {observed.text!r:.80}, unstreamed {unstreamed_text!r:.80}")
    complaints = _complaints(answer, observed)
    if observed.token_ids is None or not answer.expected.token_ids:
        return _compare_text(answer, observed, complaints)
    divergence = first_divergence(answer, observed.token_ids, case.is_greedy)
    if divergence is not None:
        return replace(divergence, detail="; ".join(text for _, text in complaints))
    if complaints:
        return Regression(complaints[0][0], "; ".join(text for _, text in complaints))
    return drift(answer.noise, shift_of(answer, observed.logprobs)) or Identical("ids")


def _prompt_regression(case: Case, got: Sequence[int]) -> Regression:
    """The prompt is not the recorded one: the model was asked something else, so its answer is not looked at."""
    position = first_difference(case.prompt_token_ids, got)
    return Regression(
        "prompt ids",
        f"{len(case.prompt_token_ids)} prompt ids recorded, {len(got)} served",
        position=position,
        expected=_at(case.prompt_token_ids, position),
        got=_at(got, position),
    )


def _complaints(answer: Answer, observed: Observed) -> list[tuple[str, str]]:
    """(what, detail) of each served-path fact that differs, most telling first."""
    expected = answer.expected
    found = []
    if observed.num_prompt_tokens not in (None, expected.num_prompt_tokens):
        found.append(("usage", f"{observed.num_prompt_tokens} prompt tokens counted, not {expected.num_prompt_tokens}"))
    if observed.num_output_tokens not in (None, expected.num_output_tokens):
        found.append(("usage", f"{observed.num_output_tokens} tokens counted, not {expected.num_output_tokens}"))
    if observed.finish_reason != expected.finish_reason:
        found.append(("finish reason", f"finish reason {observed.finish_reason}, not {expected.finish_reason}"))
    if observed.text != expected.text:
        at = first_difference(expected.text, observed.text) or 0
        was, now = expected.text[at : at + 16], observed.text[at : at + 16]
        found.append(("text", f"text differs at character {at}: {was!r} became {now!r}"))
    return found


def _compare_text(answer: Answer, observed: Observed, complaints: list[tuple[str, str]]) -> Outcome:
    """Without ids equal text is as much as can be said, and different text cannot be classified.

    How many tokens a server counts that shows none is its own affair: some leave out the one that ended the answer.
    """
    if observed.text == answer.expected.text:
        endings = [detail for what, detail in complaints if what == "finish reason"]
        return Regression("finish reason", endings[0]) if endings else Identical("text")
    return Diverged(f"cannot classify without token ids: {complaints[-1][1]}")


def first_divergence(answer: Answer, got: Sequence[int], is_greedy: bool, start: int = 0) -> Regression | None:
    """The first output position from `start` on whose id differs, with the record's margin there and what it cost.

    got: what was served from `start` on.
    """
    rest = answer.expected.token_ids[start:]
    offset = first_difference(rest, got)
    if offset is None:
        return None
    position, expected_id, got_id = start + offset, _at(rest, offset), _at(got, offset)
    recorded = answer.positions[position] if position < len(answer.positions) else None
    return Regression(
        "tokens",
        "",
        position=position,
        expected=expected_id,
        got=got_id,
        margin=recorded.margin if recorded else None,
        regret=regret(recorded, expected_id, got_id) if recorded and is_greedy else None,
    )


def regret(recorded: Position, expected_id: int | None, got_id: int | None) -> float | None:
    """What choosing `got_id` gave up, in nat; infinite outside the recorded top, None when either side had ended."""
    if expected_id is None or got_id is None:
        return None
    expected, got = recorded.top_logprob(expected_id), recorded.top_logprob(got_id)
    if expected is None:
        expected = recorded.logprob
    return math.inf if got is None else expected - got


def first_difference(one: Sequence[object], other: Sequence[object]) -> int | None:
    """First index where two sequences differ, one ending before the other included; None when they are equal."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def _at(values: Sequence[int], position: int | None) -> int | None:
    return values[position] if position is not None and position < len(values) else None


# -- logprobs ----------------------------------------------------------------------------------------------------------
def tau(noise: Noise) -> float:
    """Nat up to which two tokens were as likely: twice the recorded p99, within LEAST_TAU and LARGEST_TAU."""
    floor = max(noise.floor.p99, noise.reference.p99 if noise.reference else 0.0)
    return min(max(2 * floor, LEAST_TAU), LARGEST_TAU)


def shift_of(answer: Answer, logprobs: Sequence[float] | None, start: int = 0) -> Shift | None:
    """How far the logprobs of the recorded tokens from `start` on are from the record; None where there are none."""
    recorded = [position.logprob for position in answer.positions[start:]]
    count = min(len(recorded), len(logprobs or ()))
    return None if logprobs is None or not count else shift(np.subtract(logprobs[:count], recorded[:count]).tolist())


def shift(differences: Sequence[float]) -> Shift:
    """Mean and p99 of |Δlogprob|."""
    sizes = np.abs(np.asarray(differences, np.float64))
    return Shift(float(sizes.mean()), float(np.quantile(sizes, 0.99)))


def drift_limit(noise: Noise) -> Shift:
    """What a shift may be before it is one: three times what the numerics of this hard key did at record time."""
    return Shift(max(3 * noise.floor.mean, LEAST_DRIFT), max(3 * noise.floor.p99, LEAST_DRIFT))


def drift(noise: Noise, found: Shift | None) -> Drift | None:
    """The drift that a shift is; None where it is within its limit, or there is none to judge."""
    limit = drift_limit(noise)
    # written so that a logprob that is no number is a drift too
    if found is None or (found.mean <= limit.mean and found.p99 <= limit.p99):
        return None
    return Drift(found, limit)


# -- what a run of outcomes ends with ----------------------------------------------------------------------------------
def exit_code(
    outcomes: Sequence[Outcome], require: bool, *, strict_ties: bool = False, reject_stale: bool = False
) -> int:
    """0 identical or tie · 1 regression, drift, diverged · 3 not judged · 4 unrecorded or nothing · 5 stale files.

    4 only under `require`, 5 only under `reject_stale`; `strict_ties` makes a tie a 1.
    """
    codes = {_exit_code(outcome, require, strict_ties, reject_stale) for outcome in outcomes}
    if require and all(isinstance(outcome, Stale) for outcome in outcomes):
        codes.add(4)
    return next((code for code in (1, 3, 4, 5) if code in codes), 0)


def _exit_code(outcome: Outcome, require: bool, strict_ties: bool, reject_stale: bool) -> int:
    match outcome:
        case Identical():
            return 0
        case Tie():
            return 1 if strict_ties else 0
        case Regression() | Drift() | Diverged():
            return 1
        case NotJudged():
            return 3
        case Unrecorded():
            return 4 if require else 0
        case Stale():
            return 5 if reject_stale else 0
