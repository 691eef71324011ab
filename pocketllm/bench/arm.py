"""An arm: a name, a target and the options that differ; the null arm.

`NAME[:key=value[,key=value…]]`: the name ends at the first `:`, and `url=` takes the rest of the string.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any
from urllib.parse import urlsplit

from pocketllm.engine.options import SWITCHABLE, EngineOptions, convert
from pocketllm.errors import OptionError

REST_KEYS = ("cmd", "url", "path")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,31}")
NULL_NAME = "null"


class Role(Enum):
    """What an arm is there for."""

    BASELINE = "baseline"
    CANDIDATE = "candidate"
    NULL = "null"


class Isolation(Enum):
    """What differs between two arms, and so what a verdict may claim."""

    TOGGLE = "toggle"
    ATTACH = "attach"


CLAIMS = {
    Isolation.TOGGLE: "options switched in one loaded process; the null arm is the same process relabelled",
    Isolation.ATTACH: "these endpoints, now; the null arm is the baseline's endpoint relabelled",
}


@dataclass(frozen=True)
class Arm:
    """One thing to be timed. `options` are the switchable options that differ; `url` is set for an attach arm."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    url: str | None = None
    role: Role = Role.CANDIDATE


@dataclass(frozen=True)
class ArmSet:
    """The arms of one run, baseline first and the null arm last (when there is one)."""

    arms: tuple[Arm, ...]
    isolation: Isolation

    @property
    def baseline(self) -> Arm:
        return self.arms[0]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(arm.name for arm in self.arms)

    @property
    def candidates(self) -> tuple[Arm, ...]:
        return tuple(arm for arm in self.arms if arm.role is Role.CANDIDATE)

    @property
    def null(self) -> Arm | None:
        return next((arm for arm in self.arms if arm.role is Role.NULL), None)


def parse_arm(text: str) -> Arm:
    """One `--arms` value. Raises OptionError naming the arm and what is wrong with it.

    >>> parse_arm("chunk-64:prefill_chunk=64").options
    {'prefill_chunk': 64}
    >>> parse_arm("peer:url=http://127.0.0.1:8080").url
    'http://127.0.0.1:8080'
    """
    name, colon, rest = text.partition(":")
    if not NAME.fullmatch(name):
        raise OptionError(
            f"--arms {text!r}: {name!r} is not a name: a letter or digit, then at most 31 of letters, digits and ._+-"
        )
    if name == NULL_NAME:
        raise OptionError(f"--arms {text!r}: the name {NULL_NAME!r} belongs to the null arm, which joins by itself")
    if colon and not rest:
        raise OptionError(f"--arms {text!r}: nothing follows the colon; write {name} alone or {name}:key=value")
    settings = parse_settings(name, rest)
    url = settings.pop("url", None)
    if url is not None and settings:
        raise OptionError(
            f"--arms {name}: url= cannot be combined with {', '.join(settings)}: a server has its own options"
        )
    return Arm(name, settings, None if url is None else check_url(name, url))


def parse_settings(name: str, rest: str) -> dict[str, Any]:
    """`key=value,…` as typed values; a key of REST_KEYS takes all that follows."""
    settings: dict[str, Any] = {}
    while rest:
        key, equals, tail = rest.partition("=")
        if not equals:
            raise OptionError(f"--arms {name}: {rest!r} is not key=value; known keys: {', '.join(known_keys())}")
        value, comma, rest = (tail, "", "") if key in REST_KEYS else tail.partition(",")
        if comma and not rest:
            raise OptionError(f"--arms {name}: nothing follows the last comma")
        if key in settings:
            raise OptionError(f"--arms {name}: {key} is given twice")
        settings[key] = setting(name, key, value)
    return settings


def setting(name: str, key: str, value: str) -> Any:
    """One typed value; raises OptionError for a key that cannot differ between arms."""
    if key in ("cmd", "path"):
        raise OptionError(
            f"--arms {name}: {key}= needs arms in processes of their own, which this version does not have; "
            "it has options switched in one process (prefill_chunk=64) and running servers (url=http://…)"
        )
    if key == "url":
        return value
    if key in SWITCHABLE:
        return convert(key, value, f"--arms {name}")
    if key in {item.name for item in fields(EngineOptions)} - {"sources"}:
        raise OptionError(
            f"--arms {name}: {key} cannot be switched over loaded weights; give it to all arms with a flag, "
            f"or differ in one of: {', '.join(known_keys())}"
        )
    raise OptionError(f"--arms {name}: unknown key {key!r}; known: {', '.join(known_keys())}")


def known_keys() -> list[str]:
    """Keys that an arm of this version may carry."""
    return [*sorted(SWITCHABLE), "url"]


def check_url(name: str, url: str) -> str:
    """A base URL without a trailing slash and `/v1`; OptionError when it is not http(s)."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable:
        raise OptionError(f"--arms {name}: url={url!r} is not an http:// or https:// address")
    if parts.query or parts.fragment or parts.username:
        raise OptionError(f"--arms {name}: url= must be a plain base address, without user, query or fragment")
    return url.rstrip("/").removesuffix("/v1")


def make_arms(
    texts: Sequence[str], options: EngineOptions, baseline: str | None = None, with_null: bool = True
) -> ArmSet:
    """Parse, order and check all arms, and add the null arm; the first is the baseline unless `baseline` names one.

    Raises OptionError for duplicates, for two arms equal in plan and target, and for a mix of kinds.
    """
    parsed = [parse_arm(text) for text in texts]
    if len(parsed) < 2 and not with_null:
        raise OptionError("--no-null leaves one arm: nothing to compare; give --arms twice or more")
    if not parsed:
        raise OptionError(
            "no arms: give --arms NAME[:key=value,…] at least once, e.g. --arms base --arms b:prefill_chunk=64"
        )
    check_distinct(parsed, options)
    isolation = isolation_of(parsed)
    first = pick_baseline(parsed, baseline)
    others = [arm for arm in parsed if arm.name != first.name]
    arms = [replace(first, role=Role.BASELINE), *others]
    if with_null:
        arms.append(replace(first, name=NULL_NAME, role=Role.NULL))
    return ArmSet(tuple(arms), isolation)


def pick_baseline(arms: Sequence[Arm], name: str | None) -> Arm:
    """The arm called `name`, or the first."""
    if name is None:
        return arms[0]
    for arm in arms:
        if arm.name == name:
            return arm
    raise OptionError(f"--baseline {name!r} is not an arm; arms: {', '.join(arm.name for arm in arms)}")


def isolation_of(arms: Sequence[Arm]) -> Isolation:
    """Toggle or attach; a mix is refused, because nothing could be claimed from it."""
    with_url = [arm.name for arm in arms if arm.url is not None]
    if not with_url:
        return Isolation.TOGGLE
    without = [arm.name for arm in arms if arm.url is None]
    if without:
        raise OptionError(
            f"arm {without[0]} runs in this process, arm {with_url[0]} is a server: serve both and give each its url="
        )
    return Isolation.ATTACH


def check_distinct(arms: Sequence[Arm], options: EngineOptions) -> None:
    """Refuse two arms with one name, or that would run the same thing."""
    seen_names: set[str] = set()
    seen: dict[str, str] = {}
    for arm in arms:
        if arm.name in seen_names:
            raise OptionError(f"two arms are called {arm.name!r}")
        seen_names.add(arm.name)
        said = dict.fromkeys(arm.options, f"--arms {arm.name}")
        # raises OptionError for a value out of range
        effective = replace(options, **arm.options, sources={**options.sources, **said})
        key = f"{arm.url} {sorted(effective.as_dict().items(), key=str)}"
        if key in seen:
            raise OptionError(
                f"arms {seen[key]} and {arm.name} are equal in plan and target: the null arm already measures that"
            )
        seen[key] = arm.name
