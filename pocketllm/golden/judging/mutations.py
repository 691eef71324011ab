"""A case and its answer with one thing changed, which verify must see: a check that cannot fail is no check."""

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pocketllm.golden.fixture import Answer, Case, Position

if TYPE_CHECKING:
    from pocketllm.golden.subject import Subject

Mutation = Literal["id", "prompt-id", "logit", "template"]
MUTATIONS: tuple[Mutation, ...] = ("id", "prompt-id", "logit", "template")
LOGIT_CHANGE = 0.5
"""Nat: as much as a logit of a token that had half of the probability, changed by 1."""


def mutated(subject: "Subject", case: Case, answer: Answer, mutate: Mutation | None) -> tuple[Case, Answer]:
    """The pair itself, or a copy: one output id, one prompt id or one logprob changed, or another template.

    `template` puts a space before the messages of a chat, and before the prompt of a completion.
    """
    match mutate:
        case None:
            return case, answer
        case "id":
            ids = _with_one_changed(answer.expected.token_ids)
            return case, replace(answer, expected=replace(answer.expected, token_ids=ids))
        case "prompt-id":
            return replace(case, prompt_token_ids=_with_one_changed(case.prompt_token_ids)), answer
        case "logit":
            return case, replace(answer, positions=_with_one_moved(answer.positions))
        case "template":
            return replace(case, prompt_token_ids=subject.prompts.other_template_ids(case)), answer


def _with_one_changed(ids: tuple[int, ...]) -> tuple[int, ...]:
    middle = len(ids) // 2
    return (*ids[:middle], ids[middle] ^ 1, *ids[middle + 1 :]) if ids else ids


def _with_one_moved(positions: tuple[Position, ...]) -> tuple[Position, ...]:
    if not positions:
        return positions
    middle = len(positions) // 2
    moved = replace(positions[middle], logprob=positions[middle].logprob - LOGIT_CHANGE)
    return (*positions[:middle], moved, *positions[middle + 1 :])
