"""Outcomes as sentences: in token ids for records, with the tokens' texts for people; judges nothing."""

import math
from collections.abc import Callable

from pocketllm.golden.compare import (
    Diverged,
    Drift,
    Identical,
    NotJudged,
    Outcome,
    Regression,
    Stale,
    Tie,
    Unrecorded,
)

TokenText = Callable[[int], str]


def describe(outcome: Outcome) -> str:
    """An outcome in a clause, token ids as numbers; nothing where the word says it all."""
    match outcome:
        case Identical(scope=scope):
            return "text only: the server shows no token ids" if scope == "text" else ""
        case Tie():
            places = ", ".join(map(str, outcome.positions))
            return f"at {places}: lead {outcome.margin:.2g}, regret {outcome.regret:.2g}, within {outcome.tau:.2g} nat"
        case Drift():
            found, limit = outcome.shift, outcome.limit
            return (
                f"logprobs of the recorded tokens moved by {found.mean:.2g} nat on average and {found.p99:.2g} at the "
                f"99th percentile; {limit.mean:.2g} and {limit.p99:.2g} are this record's noise"
            )
        case Diverged():
            return outcome.reason + _place(outcome)
        case Unrecorded(reason=reason) | NotJudged(reason=reason) | Stale(reason=reason):
            return reason
        case Regression():
            detail = f"; {outcome.detail}" if outcome.detail else ""
            return outcome.what + _place(outcome) + detail


def _place(outcome: Regression | Diverged, token_text: TokenText | None = None) -> str:
    if outcome.position is None:
        return ""
    expected, got = (token(one, token_text) for one in (outcome.expected, outcome.got))
    return f" at {outcome.position}: expected {expected}, served {got}"


def token(token_id: int | None, token_text: TokenText | None = None) -> str:
    """A token as its id, and as its text where that is known."""
    if token_id is None:
        return "the end"
    return str(token_id) if token_text is None else f"{token_id} {token_text(token_id)!r}"


def explain(outcome: Outcome, token_text: TokenText, cause: str = "") -> str:
    """An outcome with its tokens as text: first divergence, the recorded lead there, and what the other choice cost."""
    if isinstance(outcome, Unrecorded):
        return f"{outcome.reason}; `pocketllm golden record` proposes one"
    if isinstance(outcome, Diverged):
        return outcome.reason + _place(outcome, token_text)
    if not isinstance(outcome, Regression):
        return describe(outcome)
    parts = [outcome.what + _place(outcome, token_text)]
    if outcome.margin is not None:
        parts.append(f"recorded lead of the most likely token {outcome.margin:.3f} nat")
    if outcome.regret is not None:
        is_far = math.isinf(outcome.regret)
        parts.append("served token outside the recorded top" if is_far else f"regret {outcome.regret:.3f} nat")
    if outcome.detail:
        parts.append(outcome.detail)
    if outcome.what == "prompt ids" and cause:
        parts.append(cause)
    return "; ".join(parts)
