"""What was served against what was recorded; pure.

The served path comes first (status, prompt ids, then usage, finish reason and text), so that a changed template or
tokenizer is called that, and not a model that answers otherwise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pocketllm.golden.fixture import Answer, Case, Position


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
    ttft_s: float | None = None
    e2el_s: float | None = None


@dataclass(frozen=True)
class Identical:
    """The recorded answer came back; by text alone where no ids were shown."""

    scope: Literal["ids", "text"] = "ids"
    word = "IDENTICAL"


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
class Unrecorded:
    """There is no answer for this hard key."""

    reason: str
    word = "UNRECORDED"


@dataclass(frozen=True)
class NotJudged:
    """The instrument could not decide: never a pass."""

    reason: str
    word = "NOT JUDGED"


Outcome = Identical | Regression | Unrecorded | NotJudged


def compare(case: Case, answer: Answer, observed: Observed, unstreamed_text: str | None = None) -> Outcome:
    """Judge one observation; `unstreamed_text` is what the same request gave without streaming, where known.

    Raises nothing: whatever cannot be compared is NotJudged.
    """
    if observed.status == 503:
        return NotJudged(f"the server is not ready or full: {observed.error or 'HTTP 503'}")
    if observed.status == 401:
        return NotJudged(f"HTTP 401: {observed.error}; give its key with --api-key")
    if observed.status != 200:
        return Regression("status", f"HTTP {observed.status}: {observed.error}".rstrip(": "))
    if observed.error:
        return Regression("schema", observed.error)
    if observed.prompt_token_ids is not None and observed.prompt_token_ids != case.prompt_token_ids:
        return _prompt_regression(case, observed.prompt_token_ids)
    if unstreamed_text is not None and observed.text != unstreamed_text:
        return Regression("stream text", f"streamed {observed.text!r:.80}, unstreamed {unstreamed_text!r:.80}")
    complaints = _complaints(answer, observed)
    if observed.token_ids is None:
        return _compare_text(answer, observed, complaints)
    divergence = _first_divergence(answer, observed.token_ids, case.is_greedy)
    if divergence is not None:
        return replace(divergence, detail="; ".join(text for _, text in complaints))
    if complaints:
        return Regression(complaints[0][0], "; ".join(text for _, text in complaints))
    return Identical("ids")


def _prompt_regression(case: Case, got: Sequence[int]) -> Regression:
    """The prompt is not the recorded one: the model was asked something else, so its answer is not looked at."""
    position = _first_difference(case.prompt_token_ids, got)
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
        at = _first_difference(expected.text, observed.text) or 0
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
    return NotJudged(f"cannot classify without token ids: {complaints[-1][1]}")


def _first_divergence(answer: Answer, got: Sequence[int], is_greedy: bool) -> Regression | None:
    """The first output position whose id differs, with the record's margin there and the regret of what was served."""
    position = _first_difference(answer.expected.token_ids, got)
    if position is None:
        return None
    expected_id, got_id = _at(answer.expected.token_ids, position), _at(got, position)
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


def _first_difference(one: Sequence[object], other: Sequence[object]) -> int | None:
    """First index where two sequences differ, one ending before the other included; None when they are equal."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def _at(values: Sequence[int], position: int | None) -> int | None:
    return values[position] if position is not None and position < len(values) else None


def exit_code(outcomes: Sequence[Outcome], require: bool) -> int:
    """0 all identical · 1 a regression · 3 one not judged · 4 unrecorded or nothing at all, under `require`."""
    codes = {_exit_code(outcome, require) for outcome in outcomes}
    if not outcomes and require:
        return 4
    return next((code for code in (1, 3, 4) if code in codes), 0)


def _exit_code(outcome: Outcome, require: bool) -> int:
    match outcome:
        case Identical():
            return 0
        case Regression():
            return 1
        case NotJudged():
            return 3
        case Unrecorded():
            return 4 if require else 0
