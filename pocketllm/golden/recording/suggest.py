"""Which prompts make good goldens: those whose answers leave no position to chance on another machine."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pocketllm.errors import RecordError
from pocketllm.golden.compare import tau
from pocketllm.golden.fixture import Answer, Case
from pocketllm.golden.recording.noise import open_variations
from pocketllm.golden.recording.record import PROBE, record_case, request
from pocketllm.golden.subject import Subject

NAME_LENGTH = 32


@dataclass(frozen=True)
class Suggestion:
    """One prompt, what the model says to it, and how clear it is about that."""

    case: Case
    answer: Answer

    @property
    def margin(self) -> float:
        """Smallest lead of a token over the next, in nat."""
        return self.answer.smallest_margin

    @property
    def least(self) -> float:
        """What the margin must be: three times what this prompt's own noise may turn over."""
        return 3 * tau(self.answer.noise)

    @property
    def is_clear(self) -> bool:
        return self.margin >= self.least

    @property
    def is_empty(self) -> bool:
        """Whether the answer ends at once: it would prove one decision, and no text."""
        return not self.answer.expected.text

    @property
    def is_refused(self) -> bool:
        return self.is_empty or (not self.is_clear and PROBE not in self.case.tags)

    @property
    def reason(self) -> str | None:
        """Why it is refused; None where it is not."""
        if self.is_empty:
            return "the answer ends at once and has no text: ask something that is answered (--chat asks as a user)"
        return "its smallest margin is below what its noise may turn over" if self.is_refused else None

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "case": self.case.name,
            "prompt": self.case.prompt or self.case.messages[0]["content"],
            "text": self.answer.expected.text,
            "n_out": len(self.answer.expected.token_ids),
            "smallest_margin": self.margin,
            "least_margin": self.least,
            "refused": self.is_refused,
            "reason": self.reason,
            "tags": list(self.case.tags),
        }


def suggest(
    subject: Subject, requests: Sequence[Case], on_one: Callable[[Suggestion], None] = lambda one: None
) -> list[Suggestion]:
    """Answer each request as a recording would, and rank them: the clearest first, refused ones last.

    Writes nothing. RecordError for a request whose three repeats disagree.
    """
    from pocketllm.golden.entry_points.in_process import load

    found = []
    with load(subject) as llm, open_variations(subject, llm) as variations:
        for asked in requests:
            found.append(Suggestion(*record_case(llm, subject, asked, {}, variations)))
            on_one(found[-1])
    return sorted(found, key=lambda one: (one.is_refused, -one.margin))


def requests_of(lines: Sequence[str], *, is_chat: bool, max_tokens: int, is_probe: bool) -> list[Case]:
    """A request for each line that holds a prompt; RecordError when none does."""
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise RecordError("no prompt to try: give a file with one a line")
    sampling = {"max_tokens": max_tokens, "temperature": 0.0}
    tags = {"tags": [PROBE]} if is_probe else {}
    found = []
    for number, prompt in enumerate(prompts, 1):
        asked = {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}
        table = {"purpose": "suggested", **asked, "sampling": sampling, **tags}
        found.append(request(name_of(prompt, number), table, "suggest"))
    return found


def name_of(prompt: str, number: int) -> str:
    """A case name made of a prompt's first words.

    >>> name_of("Name the capital of France.", 3), name_of("日本", 4)
    ('name-the-capital-of-france', 'prompt-4')
    """
    words = re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:NAME_LENGTH].strip("-")
    return words or f"prompt-{number}"
