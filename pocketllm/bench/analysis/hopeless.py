"""Whether a run can still be anything but INVALID: one that cannot is ended, and costs nobody more time; pure."""

from collections.abc import Sequence

from pocketllm.bench.analysis import conditions, validity
from pocketllm.bench.analysis.contrasts import Question
from pocketllm.bench.analysis.slots import missing_blocks, missing_notes, slot_table
from pocketllm.bench.analysis.validity import Check, Measured, Severity, blocks_of
from pocketllm.bench.schedule import MIN_BLOCKS

FIRST_BLOCKS = 4
"""A run ends after so many blocks when each of them fails: what failed them all is no accident that passes."""
SETTLED = ("V02", "V03", "V12")
"""Rules of the whole run that count what has happened, so that no later block mends them. V04 and V14 are means, V05 to
V07 estimates: further blocks move them."""
REMEDIES = {
    "V01": "see what the arm prints (logs/ beside the records), or leave it out",
    "V02": "ask for lengths that every arm gives (--input-len, --output-len), or leave the arm out",
    "V03": "see what the arm prints (logs/ beside the records), or leave it out",
    "V04": "let no arm find prompts in a cache that another has not (prefix_cache=false)",
    "V08": "let the machine cool, or lower its power limit, before the next run",
    "V10": "keep fewer requests in flight (--points)",
    "V12": "leave weights and servers as they are while a run lasts",
    "V14": "ask the server itself, past any proxy, and let it stream each token as it comes",
}
"""What to change, of rules whose own words do not say it."""


def hopeless(question: Question, measured: Sequence[Measured], extra: Sequence[Check] = ()) -> str | None:
    """Why a run is to end that has measured these requests, whole blocks of them; None while it may be valid.

    extra: checks that no request shows, such as V12.
    """
    scenario, seen = question.scenario, blocks_of(measured)
    checks = [*without_notes(extra), *checks_of(question, measured)]
    settled = [check for check in checks if check.code in SETTLED]
    if settled:
        return f"no further block can make it valid{because(settled)}"
    slots = [slot for slot in question.slots if slot.block in seen]
    table = slot_table(scenario, measured)
    missing = missing_blocks(scenario, slots, table)
    lost = validity.lost_blocks(checks) | missing
    silent = missing_notes(scenario, slots, measured, table)
    if question.blocks - len(lost) < MIN_BLOCKS:
        return f"{len(lost)} of {question.blocks} blocks are lost, {MIN_BLOCKS} are needed{because(checks, silent)}"
    alone = {block: [item for item in measured if item.block == block] for block in seen}
    if len(seen) == FIRST_BLOCKS and all(block in missing or checks_of(question, alone[block]) for block in seen):
        return f"each of them fails{because(checks, silent)}"
    return None


def checks_of(question: Question, measured: Sequence[Measured]) -> list[Check]:
    """The rules that requests break, notes apart."""
    scenario, names = question.scenario, question.arm_set.names
    checks = validity.sample_checks(measured, scenario.n_prompt, scenario.n_out, names)
    checks += conditions.condition_checks(measured, scenario.primary)
    return without_notes(checks)


def without_notes(checks: Sequence[Check]) -> list[Check]:
    """The checks that take blocks or the run with them."""
    return [check for check in checks if check.severity is not Severity.NOTE]


def because(checks: Sequence[Check], silent: Sequence[str] = ()) -> str:
    """What broke and what to change, in half sentences; silent: words on values that no request shows."""
    told = [f"{check.code} {check.detail}" for check in checks]
    advice = dict.fromkeys(REMEDIES[check.code] for check in checks if check.code in REMEDIES)
    return "".join(f": {'; '.join(part)}" for part in ([*told, *silent], advice) if part)
