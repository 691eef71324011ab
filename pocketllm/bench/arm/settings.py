"""What was said of each arm, on the command line or in a TOML file, checked and typed.

`NAME[:key=value[,key=value…]]`: the name ends at the first `:`, and `url=`, `cmd=`, `path=` and `args=` take the rest
of the string.
"""

import difflib
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pocketllm.engine.options import SWITCHABLE, EngineOptions, convert
from pocketllm.errors import OptionError

NULL_NAME = "null"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,31}")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
REST_KEYS = ("url", "cmd", "path", "args")
TARGET_KEYS = ("url", "cmd", "path", "recipe")
ONLY_WITH = {
    "args": ("recipe",),
    "key_env": ("url",),
    "ready": ("cmd", "recipe"),
    "ready_timeout": ("cmd", "recipe"),
}
"""Keys that mean nothing without one of some others."""
OPTION_KEYS = tuple(item.name for item in fields(EngineOptions) if item.name != "sources")
KEYS = (*OPTION_KEYS, *TARGET_KEYS, "via", *ONLY_WITH)
FILE_KEYS = (*KEYS, "environment")
"""Keys of a TOML file's table; a command line has no tables."""
PLACEHOLDER = re.compile(r"\{(\w+)\}")
PLACEHOLDERS = ("model_path", "model_name", "port", "threads")


class Role(Enum):
    """What an arm is there for."""

    BASELINE = "baseline"
    CANDIDATE = "candidate"
    NULL = "null"


class Isolation(Enum):
    """What differs between two arms, and so what a verdict may claim."""

    TOGGLE = "toggle"
    PROCESS = "process"
    ATTACH = "attach"


class Via(Enum):
    """How this engine is asked where arms are processes."""

    HTTP = "http"
    """A `pocketllm serve` of its own, over loopback."""
    ENGINE = "engine"
    """Loaded in the measuring process, without a server in between."""


@dataclass(frozen=True)
class Launch:
    """A server started by command line. `command` holds placeholders: {model_path} {model_name} {port} {threads}."""

    command: str
    ready_path: str = "/v1/models"
    """Answers 200 once requests can be sent."""
    ready_timeout_s: float = 300.0
    environment: Mapping[str, str] = field(default_factory=dict)
    recipe: str | None = None

    def words(self, values: Mapping[str, str]) -> list[str]:
        """The argument list with its placeholders filled in."""
        return [fill(word, values) for word in shlex.split(self.command)]


def fill(text: str, values: Mapping[str, str]) -> str:
    """A text with `{name}` replaced; other braces stay."""
    return PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), text)


@dataclass(frozen=True)
class Arm:
    """One thing to be timed. `options` are the engine options that differ from the common ones.

    At most one of `url` (a running server), `launch` (a server of any make that is started here) and `path` (another
    checkout of this project) is set; with none it is this engine, in this process or in one of its own.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    url: str | None = None
    launch: Launch | None = None
    path: str | None = None
    via: Via | None = None
    key_env: str | None = None
    """Environment variable that holds the API key for `url`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables set for this arm's process alone."""
    role: Role = Role.CANDIDATE

    @property
    def is_switchable(self) -> bool:
        """Whether it is a second loop over weights that are loaded in this process."""
        elsewhere = self.url or self.launch or self.path or self.via or self.environment
        return not elsewhere and set(self.options) <= SWITCHABLE

    @property
    def runs_here(self) -> bool:
        """Whether the engine is in this process although other arms are processes."""
        return self.via is Via.ENGINE

    def difference(self) -> dict[str, Any]:
        """All that makes this arm differ, whatever it is called; no secrets and no absolute paths."""
        return {
            "options": dict(self.options),
            "url": self.url,
            "launch": self.launch and self.launch.command,
            "path": self.path,
            "via": self.via and self.via.value,
            "environment": dict(self.environment),
        }


def read_arms(texts: Sequence[str]) -> tuple[list[Arm], str | None]:
    """All arms of `--arms` values, and the baseline that a file names; OptionError in a sentence for a bad one."""
    found: list[Arm] = []
    baseline: str | None = None
    for text in texts:
        if text.endswith(".toml") and ":" not in text:
            arms, named = read_file(Path(text))
            found += arms
            baseline = named or baseline
        else:
            found.append(read_text(text))
    return found, baseline


def read_text(text: str) -> Arm:
    """One arm of the command line."""
    name, colon, rest = text.partition(":")
    where = f"--arms {text!r}"
    check_name(name, where)
    if colon and not rest:
        raise OptionError(f"{where}: nothing follows the colon; write {name} alone or {name}:key=value")
    return arm_of(name, split(name, rest), f"--arms {name}", KEYS)


def split(name: str, rest: str) -> dict[str, str]:
    """`key=value,…` as texts; a key of REST_KEYS takes all that follows."""
    found: dict[str, str] = {}
    while rest:
        key, equals, tail = rest.partition("=")
        if not equals:
            raise OptionError(f"--arms {name}: {rest!r} is not key=value; known keys: {', '.join(KEYS)}")
        value, comma, rest = (tail, "", "") if key in REST_KEYS else tail.partition(",")
        if comma and not rest:
            raise OptionError(f"--arms {name}: nothing follows the last comma")
        if key in found:
            raise OptionError(f"--arms {name}: {key} is given twice")
        found[key] = value
    return found


def read_file(path: Path) -> tuple[list[Arm], str | None]:
    """Arms of a TOML file: a table `[arms.NAME]` each, with the keys of the command line and `environment`."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise OptionError(f"--arms {path}: no such file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"--arms {path.name} is not valid TOML: {error}") from error
    except OSError as error:
        raise OptionError(f"--arms {path.name} cannot be read: {error.strerror}") from error
    unknown = sorted(set(document) - {"arms", "baseline"})
    arms, baseline = document.get("arms"), document.get("baseline")
    if unknown or not isinstance(arms, dict) or not arms or not isinstance(baseline, str | None):
        what = f"{unknown[0]!r} is not known" if unknown else "there is no [arms.NAME] table, or baseline is no name"
        raise OptionError(f"--arms {path.name}: {what}; write one [arms.NAME] table an arm, and baseline = NAME")
    found = []
    for name, table in arms.items():
        where = f"{path.name}, [arms.{name}]"
        check_name(name, where)
        if not isinstance(table, dict):
            raise OptionError(f"{where}: {table!r} is not a table of keys")
        found.append(arm_of(name, table, where, FILE_KEYS))
    return found, baseline


def check_name(name: str, where: str) -> None:
    """OptionError for what cannot be called an arm."""
    if not NAME.fullmatch(name):
        raise OptionError(
            f"{where}: {name!r} is not a name: a letter or digit, then at most 31 of letters, digits and ._+-"
        )
    if name == NULL_NAME:
        raise OptionError(f"{where}: the name {NULL_NAME!r} belongs to the null arm, which joins by itself")


def arm_of(name: str, values: Mapping[str, Any], where: str, known: Sequence[str]) -> Arm:
    """An arm from its settings; OptionError for an unknown key, a bad value, or keys that do not go together."""
    check_keys(values, where, known)
    texts = {key: text_of(values, key, where) for key in (*TARGET_KEYS, "via", *ONLY_WITH)}
    options = {key: convert(key, values[key], where) for key in OPTION_KEYS if key in values}
    return Arm(
        name=name,
        options=options,
        url=None if texts["url"] is None else check_url(where, texts["url"]),
        launch=launch_of(texts, where),
        path=texts["path"],
        via=None if texts["via"] is None else via_of(texts["via"], where),
        key_env=texts["key_env"],
        environment=environment_of(values.get("environment", {}), where),
    )


def check_keys(values: Mapping[str, Any], where: str, known: Sequence[str]) -> None:
    """OptionError for keys that are unknown, or do not go together."""
    unknown = [key for key in values if key not in known]
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise OptionError(f"{where}: unknown key {unknown[0]!r}{hint}; known: {', '.join(known)}")
    targets = [key for key in TARGET_KEYS if key in values]
    if len(targets) > 1:
        raise OptionError(f"{where}: {' and '.join(targets)} cannot be combined: an arm is one thing")
    foreign = [key for key in targets if key != "path"]
    own = [key for key in values if key in (*OPTION_KEYS, "via")]
    if foreign and own:
        raise OptionError(f"{where}: {foreign[0]} cannot be combined with {own[0]}: a server has its own options")
    if "url" in values and "environment" in values:
        raise OptionError(f"{where}: url cannot be combined with environment: that server runs already")
    for key, needed in ONLY_WITH.items():
        if key in values and not set(needed) & set(values):
            raise OptionError(f"{where}: {key} needs {' or '.join(needed)}")
    if "path" in values and values.get("via") == Via.ENGINE.value:
        raise OptionError(f"{where}: another checkout cannot run in this process: leave via=engine out")


def text_of(values: Mapping[str, Any], key: str, where: str) -> str | None:
    """A value that must be a text with something in it."""
    value = values.get(key)
    if key == "ready_timeout" and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if value is not None and (not isinstance(value, str) or not value.strip()):
        raise OptionError(f"{where}: {key}={value!r} must be a text that is not empty")
    return value


def via_of(text: str, where: str) -> Via:
    """How the engine is asked."""
    try:
        return Via(text)
    except ValueError as error:
        raise OptionError(f"{where}: via={text!r}; known: {', '.join(item.value for item in Via)}") from error


def launch_of(texts: Mapping[str, str | None], where: str) -> Launch | None:
    """The server that cmd= or recipe= starts; None with neither."""
    from pocketllm.bench.arm.recipes import find_recipe

    if texts["recipe"] is not None:
        launch = Launch(recipe=texts["recipe"], **find_recipe(texts["recipe"], where))
        if texts["args"] is not None:
            launch = replace(launch, command=f"{launch.command} {texts['args']}")
    elif texts["cmd"] is not None:
        launch = Launch(texts["cmd"])
    else:
        return None
    check_command(launch.command, where)
    if texts["ready"] is not None:
        if not texts["ready"].startswith("/"):
            raise OptionError(f"{where}: ready={texts['ready']!r} must be a path such as /health")
        launch = replace(launch, ready_path=texts["ready"])
    if texts["ready_timeout"] is not None:
        launch = replace(launch, ready_timeout_s=seconds_of(texts["ready_timeout"], where))
    return launch


def check_command(command: str, where: str) -> None:
    """OptionError for a command line that cannot be split, names no port, or has unknown placeholders."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise OptionError(f"{where}: the command cannot be split into words: {error}") from error
    used = PLACEHOLDER.findall(command)
    unknown = [name for name in used if name not in PLACEHOLDERS]
    if unknown:
        raise OptionError(
            f"{where}: unknown placeholder {{{unknown[0]}}}; known: {', '.join(f'{{{name}}}' for name in PLACEHOLDERS)}"
        )
    if not words:
        raise OptionError(f"{where}: the command is empty")


def seconds_of(text: str, where: str) -> float:
    """A time limit in seconds."""
    try:
        seconds = float(text.removesuffix("s"))
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise OptionError(f"{where}: ready_timeout={text!r} is not a number of seconds above 0")
    return seconds


def environment_of(values: Any, where: str) -> dict[str, str]:
    """Variables by name."""
    is_table = isinstance(values, Mapping) and all(isinstance(value, str) for value in values.values())
    if not is_table or not all(VARIABLE.fullmatch(name) for name in values):
        raise OptionError(f"{where}: environment must be a table of texts by variable name")
    return dict(values)


def check_url(where: str, url: str) -> str:
    """A base URL without a trailing slash and `/v1`; OptionError when it is not http(s)."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable:
        raise OptionError(f"{where}: url={url!r} is not an http:// or https:// address")
    if parts.query or parts.fragment or parts.username:
        raise OptionError(f"{where}: url= must be a plain base address, without user, query or fragment")
    return url.rstrip("/").removesuffix("/v1")
