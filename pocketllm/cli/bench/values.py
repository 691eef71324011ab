"""Values of bench flags: durations, shares, margins, scenarios; OptionError names the flag that cannot be used."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from pocketllm.cli.output import say

if TYPE_CHECKING:
    from pocketllm.bench.arm import ArmSet
    from pocketllm.bench.scenarios.contract import Scenario
    from pocketllm.engine.options import EngineOptions

DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min|h)?")
LONGEST_S = 366 * 24 * 3600.0
MOST_TOKENS = 10_000_000
"""More than any model's context: a server at an address may not tell its own, and a prompt so long is never made."""
SHOWN = 40
"""Bytes of what somebody typed, in a sentence."""
UNITS = {None: 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def check_gates(fail_on: str | None, require: str | None, no_null: bool, num_arms: int) -> None:
    """Refuse gates that are unknown, or that have no verdict to read."""
    from pocketllm.bench.analysis.verdict import Require
    from pocketllm.errors import OptionError

    if fail_on not in (None, "slower"):
        raise OptionError(f"--fail-on {fail_on!r}: the one gate is `slower`")
    known = [item.value for item in Require]
    if require is not None and require not in known:
        raise OptionError(f"--require {require!r}: known is {', '.join(known)}")
    if no_null and (fail_on or require):
        raise OptionError("--no-null gives no verdict, so --fail-on and --require have nothing to read")
    if num_arms < 2 and (fail_on or require):
        raise OptionError("one arm and its null arm give no verdict, so --fail-on and --require have nothing to read")


def pick_scenario(name: str, input_len: int | None, output_len: int | None, points: str | None = None) -> "Scenario":
    """The scenario with the points and lengths asked for."""
    from pocketllm.bench.scenarios import find_scenario
    from pocketllm.errors import OptionError

    scenario = find_scenario(name)
    for flag, length in (("--input-len", input_len), ("--output-len", output_len)):
        at_least_one(flag, length)
        at_most(flag, length, MOST_TOKENS, "more tokens than any model's context holds")
    if points is not None:
        scenario = scenario.at([label.strip() for label in points.split(",")])
    chosen = scenario.resized(input_len, output_len)
    if "decode" in chosen.judged and chosen.n_out < 3:
        raise OptionError(
            f"--output-len {chosen.n_out}: decode is the gaps after the second token, so it needs 3 tokens"
        )
    return chosen


def at_least_one(flag: str, value: int | None) -> None:
    """Refuse what counts nothing."""
    from pocketllm.errors import OptionError

    if value is not None and value < 1:
        raise OptionError(f"{flag} {value} must be at least 1")


def at_most(flag: str, value: int | None, most: int, why: str = "more than anybody waits for") -> None:
    """Refuse what is too much."""
    from pocketllm.errors import OptionError
    from pocketllm.evidence.ci_text import shorten

    if value is not None and value > most:
        raise OptionError(f"{flag} {shorten(str(value), SHOWN)} is above {most}, {why}")


def at_least(flag: str, value: int, least: int) -> None:
    """Refuse what is too few."""
    from pocketllm.errors import OptionError

    if value < least:
        raise OptionError(f"{flag} {value} must be at least {least}")


def parse_until(text: str | None) -> float | None:
    """The share of `half-width=1%`; OptionError for another rule."""
    from pocketllm.errors import OptionError

    if text is None:
        return None
    rule, equals, value = text.partition("=")
    if rule.strip() != "half-width" or not equals:
        raise OptionError(f"--until {text!r}: the one rule is half-width=SHARE, e.g. half-width=1%")
    return parse_share(value, "--until")


def parse_duration(text: str | None, flag: str = "--budget", least: float | None = None) -> float | None:
    """Seconds of `150s`, `2.5m`, `1h` or a bare number; OptionError for anything else, or below `least` (above 0)."""
    from pocketllm.errors import OptionError
    from pocketllm.evidence.ci_text import shorten

    if text is None:
        return None
    match = DURATION.fullmatch(text.strip())
    if not match or (least is None and float(match[1]) == 0):
        raise OptionError(f"{flag} {text!r} is not a time such as 150s, 5m or 1h")
    seconds = float(match[1]) * UNITS[match[2]]
    if seconds > LONGEST_S:
        raise OptionError(f"{flag} {shorten(text, SHOWN)!r} is more than a year")
    return seconds


def parse_margins(text: str | None, scenario: "Scenario", arm_set: "ArmSet") -> dict[str, float]:
    """Margin by primary metric; OptionError for a metric that this scenario does not judge."""
    from pocketllm.bench.analysis.verdict import DEFAULT_MARGINS
    from pocketllm.errors import OptionError

    margins = dict.fromkeys(scenario.primary, DEFAULT_MARGINS[arm_set.isolation])
    for part in [] if text is None else text.split(","):
        metric, equals, value = part.rpartition("=")
        share = parse_share(value)
        if not equals:
            margins = dict.fromkeys(scenario.primary, share)
        elif metric in margins:
            margins[metric] = share
        elif metric in scenario.judged:
            margins |= {name: share for name in scenario.primary if name.partition("@")[0] == metric}
        else:
            raise OptionError(f"--margin {part!r}: {scenario.name} judges {', '.join(scenario.primary)}")
    return margins


def parse_share(text: str, flag: str = "--margin") -> float:
    """`1%` or `0.01` as 0.01; OptionError for no number, or one outside (0, 1)."""
    from pocketllm.errors import OptionError

    number = text.strip().removesuffix("%")
    try:
        share = float(number) / (100 if text.strip().endswith("%") else 1)
    except ValueError as error:
        raise OptionError(f"{flag} {text!r} is not a share such as 1% or 0.01") from error
    if not 0 < share < 1:
        raise OptionError(f"{flag} {text!r} is out of range: a share is above 0% and below 100%")
    return share


def display(path: Path) -> str:
    """A path as seen from here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def share_cores(arm_set: "ArmSet", options: "EngineOptions") -> "EngineOptions":
    """The options with a core left to the client where it needs one and nothing else was said; told on stderr."""
    from pocketllm.bench.arm import leave_client_a_core
    from pocketllm.engine.backends.api.device import read_facts

    num_cores = read_facts().num_cores
    shared = leave_client_a_core(arm_set, options, num_cores)
    if shared is not options:
        say(f"{shared.threads} of {num_cores} cores for each arm, one for the client; --threads says otherwise")
    return shared
