"""Goldens of another engine: its own answers at a URL, as far as it shows them, to hold its next version to.

What it shows decides what verification can say: token ids with logprobs give every outcome, ids alone no tie, and a
text alone only equal or not.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pocketllm.errors import RecordError
from pocketllm.golden.compare import Observed
from pocketllm.golden.entry_points.http import HttpClient, served_model
from pocketllm.golden.files.document import FINISH_REASONS
from pocketllm.golden.files.folder import FixtureFolder
from pocketllm.golden.fixture import TOP_LOGPROBS, Answer, Case, Expected, Noise, Position
from pocketllm.golden.judging.judge import ServerAt
from pocketllm.golden.recording.noise import floor
from pocketllm.golden.recording.record import (
    REPEATS,
    Proposal,
    backing_row,
    begin_record,
    position,
    propose,
    provenance,
    with_prompt,
)
from pocketllm.golden.subject import Subject


def record_peer(
    subject: Subject,
    folder: FixtureFolder,
    requests: Sequence[Case],
    server: ServerAt,
    command: Sequence[str],
    on_proposal: Callable[[Proposal], None] = lambda proposal: None,
    record_dir: Path | None = None,
) -> list[Proposal]:
    """`record.record` with a server in the engine's place; the subject names its engine (`peer`).

    RecordError for a case without an HTTP path, and for an answer that is refused, cut off or not the same three times.
    """
    unasked = [case.name for case in requests if not any(path.is_http for path in case.paths)]
    if unasked:
        raise RecordError(f"case {unasked[0]} has no http path: a server cannot be asked for it")
    model = server.model or served_model(server.url, server.api_key)
    client = HttpClient(server.url, model, server.api_key, num_top=TOP_LOGPROBS)
    proposals = []
    try:
        with begin_record(subject, requests, record_dir) as backing:
            made_by = provenance(command, backing.run_id)
            for asked in requests:
                proposals.append(propose(folder, *record_case(client, subject, asked, made_by)))
                backing.append(backing_row(folder, proposals[-1]))
                on_proposal(proposals[-1])
    finally:
        client.close()
    return proposals


def record_case(client: HttpClient, subject: Subject, asked: Case, made_by: Mapping[str, Any]) -> tuple[Case, Answer]:
    """Ask three times; the case with its prompt ids, and the answer with what the server shows."""
    from pocketllm.evidence.store import utc_now

    seen = [_checked(asked, client.answer(asked)) for _ in range(REPEATS)]
    first = seen[0]
    if any((one.token_ids, one.text) != (first.token_ids, first.text) for one in seen[1:]):
        raise RecordError(f"case {asked.name}: {REPEATS} repeats gave different answers: it cannot be a golden")
    prompt_ids = first.prompt_token_ids or subject.prompts.token_ids(asked)
    case = with_prompt(subject, asked, prompt_ids)
    token_ids = first.token_ids or ()
    answer = Answer(
        case=case.name,
        request_sha256=case.request_sha256,
        hard_key=subject.hard_key,
        expected=Expected(
            token_ids=token_ids,
            text=first.text,
            finish_reason=str(first.finish_reason),
            num_prompt_tokens=len(prompt_ids) if first.num_prompt_tokens is None else first.num_prompt_tokens,
            num_output_tokens=_num_output(first),
        ),
        positions=_positions(first),
        noise=_noise(seen),
        soft={"served_as": client.model},
        provenance={**made_by, "recorded_utc": utc_now()},
    )
    return case, answer


def _checked(asked: Case, observed: Observed) -> Observed:
    """The observation itself; RecordError for one that is no whole answer."""
    if observed.status != 200 or observed.error:
        raise RecordError(f"case {asked.name}: HTTP {observed.status}: {observed.error}; nothing was recorded")
    if observed.finish_reason not in FINISH_REASONS:
        raise RecordError(f"case {asked.name}: it ended with {observed.finish_reason!r}, not with stop or length")
    return observed


def _num_output(observed: Observed) -> int:
    """As many as its ids; without them as many as it counts."""
    return observed.num_output_tokens or 0 if observed.token_ids is None else len(observed.token_ids)


def _positions(observed: Observed) -> tuple[Position, ...]:
    if observed.token_ids is None or observed.logprobs is None or observed.tops is None:
        return ()
    return tuple(
        position(chosen, [one for one, _ in top], [value for _, value in top])
        for chosen, top in zip(observed.logprobs, observed.tops, strict=True)
    )


def _noise(seen: Sequence[Observed]) -> Noise:
    """What three repeats did to the logprobs, where they are shown."""
    rows = [one.logprobs for one in seen if one.logprobs]
    if len(rows) < len(seen):
        return Noise(len(seen), is_bit_identical=False)
    differences = [value - first for row in rows[1:] for value, first in zip(row, rows[0], strict=False)]
    return Noise(len(seen), all(row == rows[0] for row in rows), ("repeats",), floor(differences))
