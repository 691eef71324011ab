"""Other tokens than recorded: a tie, a regression, or undecidable.

At a divergence where the record itself says that two tokens were as likely, the recorded one is put in the served one's
place and the model goes on from there: if the rest then comes back, nothing but the tie was turned over.
"""

import math
from collections.abc import Callable

from pocketllm.errors import NotJudgedError
from pocketllm.golden.compare import (
    Diverged,
    NotJudged,
    Observed,
    Outcome,
    Regression,
    Shift,
    Tie,
    drift,
    first_divergence,
    shift_of,
    tau,
)
from pocketllm.golden.fixture import Answer, Case

MAX_TIES = 3
"""In 64 tokens: an answer that needs more is held up by its anchors."""
PER_TOKENS = 64

Resume = Callable[[Case, tuple[int, ...], int], Observed]
"""(case, token ids, most tokens): what the entry point says after these ids, stop strings apart."""


def settle(case: Case, answer: Answer, observed: Observed, outcome: Outcome, resume: Resume) -> Outcome:
    """The outcome itself, but what a divergence of tokens really is; never raises for a request that fails."""
    if not isinstance(outcome, Regression) or outcome.what != "tokens":
        return outcome
    if not case.is_greedy:
        return _diverged(outcome, "a draw: another token cannot be told from a tie")
    if not answer.positions or observed.logprobs is None:
        return _diverged(outcome, "cannot classify without logprobs")
    if observed.num_prompt_tokens not in (None, answer.expected.num_prompt_tokens):
        return outcome  # it was not asked the same
    try:
        return _explain(case, answer, observed, outcome, resume)
    except NotJudgedError as error:
        return NotJudged(f"a tie at {outcome.position} could not be followed: {error}")


def _diverged(found: Regression, why: str) -> Diverged:
    detail = f"; {found.detail}" if found.detail else ""
    return Diverged(why + detail, found.position, found.expected, found.got)


def _explain(case: Case, answer: Answer, observed: Observed, first: Regression, resume: Resume) -> Outcome:
    """Anchor at each tie and go on, until the recorded answer is whole or something else than a tie turns up."""
    limit, ids = tau(answer.noise), answer.expected.token_ids
    allowed = MAX_TIES * math.ceil(len(ids) / PER_TOKENS)
    found: Regression | None = first
    ties: list[Regression] = []
    shifts = [shift_of(answer, (observed.logprobs or ())[: first.position])]
    while found is not None:
        if not _is_tie(found, limit):
            return _after(found, ties)
        if len(ties) == allowed:
            return Regression("tokens", f"more than {allowed} ties in {len(ids)} tokens", found.position)
        ties.append(found)
        assert found.position is not None
        start = found.position + 1
        if start == len(ids):
            break
        rest = resume(case, (*case.prompt_token_ids, *ids[:start]), len(ids) - start)
        if rest.status != 200 or rest.error or rest.token_ids is None:
            return _diverged(first, f"no answer after the recorded token: {rest.error or f'HTTP {rest.status}'}")
        found = first_divergence(answer, rest.token_ids, True, start)
        agreed = None if found is None or found.position is None else found.position - start
        shifts.append(shift_of(answer, None if rest.logprobs is None else rest.logprobs[:agreed], start))
    return drift(answer.noise, _largest(shifts)) or Tie(
        positions=tuple(tie.position for tie in ties if tie.position is not None),
        margin=max(tie.margin or 0.0 for tie in ties),
        regret=max(tie.regret or 0.0 for tie in ties),
        tau=limit,
    )


def _is_tie(found: Regression, limit: float) -> bool:
    return found.margin is not None and found.regret is not None and max(found.margin, found.regret) <= limit


def _after(found: Regression, ties: list[Regression]) -> Regression:
    """A regression that came after ties says so."""
    if not ties:
        return found
    names = ", ".join(str(tie.position) for tie in ties)
    return Regression(
        "tokens",
        f"after a tie at {names}",
        found.position,
        found.expected,
        found.got,
        found.margin,
        found.regret,
    )


def _largest(shifts: list[Shift | None]) -> Shift | None:
    """The worst of several stretches."""
    known = [shift for shift in shifts if shift is not None]
    return Shift(max(s.mean for s in known), max(s.p99 for s in known)) if known else None
