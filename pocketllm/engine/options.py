"""Engine options: one frozen object, each value with its provenance (flag > environment > project file > default)."""

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from pocketllm.errors import OptionError

ENVIRONMENT_PREFIX = "POCKETLLM_"
BESIDE_OPTIONS = {
    "POCKETLLM_API_KEY": "keys that a server asks for, or the key that one is asked with",
    "POCKETLLM_CACHE": "the folder that catalog models are kept in",
    "POCKETLLM_CPU_ISA": "a lower instruction set than the best",
    "POCKETLLM_CPU_LIBRARY": "another file of the native library",
    "POCKETLLM_CPU_PROFILE": "where the time went, at the end",
    "POCKETLLM_NATIVE": "whether the native library is built, at installation",
    "POCKETLLM_CHAT_TEMPLATES": "a folder of published chat templates, for the tests",
}
"""What each is read for. Besides these every engine option has one: `POCKETLLM_THREADS` for `--threads`."""
OF_A_CLUSTER = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_\w+)?$|_PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?$")
"""How Kubernetes names what it tells every container of a service: one called `pocketllm` is likely."""
PROJECT_FILE = "pocketllm.toml"
DEFAULT_MODEL = "smollm2-135m"
AUTO = "auto"
"""Asks for the best backend that can run."""
ACTIVATION_DTYPES = ("int8", "mixed", "int16", "float32")
KV_DTYPES = ("float16", "bfloat16", "fp8_e4m3", "int8", "float32")
KV_DTYPE_ALIASES = {"fp8": "fp8_e4m3"}
"""Other names of some of them, as other engines' users type them."""
MAX_THREADS = 4096
"""More than any machine has cores for; a count beyond it is a slip, and might not fit the native library's 32 bits."""
MOST = 2**63 - 1
"""What counts fit 64 bits: in what they are added up, and divided, later."""

POSITIVE = (
    *("kv_cache_bytes", "threads", "max_num_seqs", "max_num_batched_tokens", "prefill_chunk", "block_size"),
    "max_queued_requests",
)
"""Options that count something there must be at least one of."""
SWITCHABLE = frozenset(
    {"max_num_seqs", "max_num_batched_tokens", "prefill_chunk", "watermark", "reserve", "prefix_cache"}
    | {"overlap", "test_step_delay"}
)
"""Options of the scheduler and its loop: a second loop over the same loaded weights can have others (`toggle` arms)."""


@dataclass(frozen=True)
class EngineOptions:
    """What the user said; None means `not said, resolve it` and the plan shows what it became."""

    model: str = DEFAULT_MODEL
    backend: str = AUTO
    max_model_len: int | None = None
    """Longest prompt plus answer of one request, in tokens; None: the checkpoint's context length."""
    max_num_seqs: int | None = None
    """Most requests in one step; None: as many as the backend is made for."""
    max_num_batched_tokens: int | None = None
    """Token budget of one step over all requests; None: the backend's own."""
    prefill_chunk: int | None = None
    """Most prompt tokens of one request in one step; None: the backend's own."""
    block_size: int = 16
    """Tokens in one cache block."""
    kv_cache_bytes: int | None = None
    """Memory for keys and values; None: enough for max_num_seqs full requests, at most what the backend takes for it
    (1 GiB of a CPU's), at least one request."""
    watermark: float = 0.01
    """Share of blocks that admission leaves free."""
    reserve: float = 1.0
    """Share of the running requests' possible growth that admission keeps free; below 1 a request may be recomputed."""
    max_queued_requests: int = 256
    """Requests that may wait before the queue refuses."""
    prefix_cache: bool = True
    """Whether a request starts from cache blocks that an earlier one filled with the same tokens."""
    overlap: bool = True
    """Whether a step is launched before the tokens of the one before are known, on a backend where that gains time."""
    threads: int | None = None
    """CPU threads; None: the cores this process may use."""
    activation_dtype: str | None = None
    """What rows are rounded to before a matrix multiplies them, one of ACTIVATION_DTYPES; None: as the model needs."""
    kv_dtype: str | None = None
    """What cached keys and values are kept in, one of KV_DTYPES or of its aliases; None: the backend's own."""
    batch_invariant: bool = False
    """Whether a request must have the same bits in any company, however its prompt is cut and wherever its first tokens
    come from; refused where that cannot be promised."""
    test_step_delay: float = 0.0
    """Share of its own time by which each step is made longer on purpose, to test what should see that; 0: none."""
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Where each value came from: flag, environment, file or default."""

    def __post_init__(self) -> None:
        if self.kv_dtype in KV_DTYPE_ALIASES:
            object.__setattr__(self, "kv_dtype", KV_DTYPE_ALIASES[self.kv_dtype])
        for name in POSITIVE:
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise OptionError(f"{self.said(name)} must be at least 1")
            if getattr(self, name) is not None and getattr(self, name) > MOST:
                raise OptionError(f"{self.said(name)[:100]} must fit 64 bits")
        if self.max_model_len is not None and self.max_model_len > MOST:
            raise OptionError(f"{self.said('max_model_len')[:100]} must fit 64 bits")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise OptionError(f"{self.said('max_model_len')} must be at least 2: a token of prompt and one of answer")
        if self.threads is not None and self.threads > MAX_THREADS:
            raise OptionError(f"{self.said('threads')} must be at most {MAX_THREADS}")
        for name in ("watermark", "reserve"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise OptionError(f"{self.said(name)} must be between 0 and 1")
        if not 0.0 <= self.test_step_delay <= 10.0:
            raise OptionError(f"{self.said('test_step_delay')} must be between 0 and 10")
        for name, known in (("activation_dtype", ACTIVATION_DTYPES), ("kv_dtype", KV_DTYPES)):
            if getattr(self, name) not in (None, *known):
                raise OptionError(f"{self.said(name)} is none of {', '.join(known)}")
        for name in ("model", "backend"):
            if not getattr(self, name).strip():
                raise OptionError(f"{self.said(name)} is empty")
        tokens, seqs = self.max_num_batched_tokens, self.max_num_seqs
        if tokens is not None and seqs is not None and tokens < seqs:
            raise OptionError(
                f"{self.said('max_num_batched_tokens')} is below {self.said('max_num_seqs')}: "
                "every running request needs one token a step"
            )

    def said(self, name: str) -> str:
        """The value and where it was said, for a message: a flag as it is typed."""
        value, source = getattr(self, name), self.sources.get(name, "argument")
        return f"--{name.replace('_', '-')} {value!r}" if source == "flag" else f"{name}={value!r} ({source})"

    def as_dict(self) -> dict[str, Any]:
        """Values by name, for plans and records."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "sources"}


def as_flag(name: str, value: Any) -> str:
    """An option as `pocketllm serve` takes it.

    >>> as_flag("block_size", 32), as_flag("prefix_cache", False)
    ('--block-size=32', '--no-prefix-cache')
    """
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag}={value}"


def resolve_options(
    flags: Mapping[str, Any], environment: Mapping[str, str] | None = None, directory: Path | None = None
) -> EngineOptions:
    """Merge flags (None: not given), POCKETLLM_* variables, ./pocketllm.toml and defaults, most explicit first.

    Raises OptionError naming the place of a value that cannot be used, or of an unknown key.
    """
    environment = os.environ if environment is None else environment
    known = option_names()
    refuse_unknown(flags, "argument")
    file_values = read_project_file((directory or Path.cwd()) / PROJECT_FILE)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name in known:
        variable = ENVIRONMENT_PREFIX + name.upper()
        sources[name] = "default"
        if flags.get(name) is not None:
            values[name], sources[name] = convert(name, flags[name], "argument"), "flag"
        elif environment.get(variable):  # an empty one is how scripts and compose files leave a variable out
            values[name] = convert(name, environment[variable], f"environment variable {variable}")
            sources[name] = f"environment {variable}"
        elif name in file_values:
            values[name] = convert(name, file_values[name], PROJECT_FILE)
            sources[name] = f"file {PROJECT_FILE}"
    return EngineOptions(**values, sources=sources)


def option_names() -> tuple[str, ...]:
    """Every option, in the order of the class."""
    return tuple(item.name for item in fields(EngineOptions) if item.name != "sources")


def known_variables() -> list[str]:
    """Names of all variables that are read."""
    return sorted({*BESIDE_OPTIONS, *(ENVIRONMENT_PREFIX + name.upper() for name in option_names())})


def warnings_of(names: Iterable[str]) -> list[str]:
    """A sentence for each name of ours that nothing reads, with the nearest that something does.

    >>> warnings_of(["POCKETLLM_BACKND", "POCKETLLM_BACKEND", "HOME"])
    ['POCKETLLM_BACKND is no variable that pocketllm reads, and does nothing: did you mean POCKETLLM_BACKEND?']
    """
    known = known_variables()
    unread = sorted({name for name in names if name.startswith(ENVIRONMENT_PREFIX)} - set(known))
    return [
        f"{name} is no variable that pocketllm reads, and does nothing{nearest(name, known)}"
        for name in unread
        if not OF_A_CLUSTER.search(name)
    ]


def nearest(name: str, known: list[str]) -> str:
    """The end of the sentence: the variable that was meant, where one is near."""
    own = {one.removeprefix(ENVIRONMENT_PREFIX): one for one in known}
    # without the prefix, which all share and which would make any two look alike
    near = difflib.get_close_matches(name.removeprefix(ENVIRONMENT_PREFIX).upper()[:100], own, n=1)
    return f": did you mean {own[near[0]]}?" if near else ""


def refuse_unknown(values: Mapping[str, Any], where: str) -> None:
    """Raise OptionError for the first name that is no engine option."""
    unknown = sorted(set(values) - set(option_names()))
    if unknown:
        raise OptionError(f"{where}: unknown engine option {unknown[0]!r}; known: {', '.join(sorted(option_names()))}")


def read_project_file(path: Path) -> dict[str, Any]:
    """The [engine] table of a project file; empty when there is no file. Raises OptionError naming the file."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"{path.name} is not valid TOML: {error}") from error
    except OSError as error:
        raise OptionError(f"{path.name} cannot be read: {error.strerror}") from error
    outside = sorted(name for name, value in document.items() if name != "engine" and not isinstance(value, dict))
    if outside:
        raise OptionError(f"{path.name}: {outside[0]!r} stands in no table: write [engine] and the options below it")
    tables = sorted(set(document) - {"engine"})
    if tables:
        raise OptionError(f"{path.name}: unknown table [{tables[0]}]; known: [engine]")
    table = document.get("engine", {})
    if not isinstance(table, dict):
        raise OptionError(f"{path.name}: engine={table!r} must be a table: write [engine] and the options below it")
    refuse_unknown(table, path.name)
    return dict(table)


def convert(name: str, value: Any, where: str) -> Any:
    """A value as the option's type: a text is parsed, anything else must be of it already.

    Raises OptionError naming where it stood.
    """
    wanted = get_type_hints(EngineOptions)[name]
    kind = next(k for k in (bool, int, float, str) if k is wanted or k in getattr(wanted, "__args__", ()))
    if kind is bool:
        return convert_switch(name, value, where)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        if isinstance(value, str):
            return kind(value)
        if is_number and kind is not str and kind(value) == value:
            return kind(value)
    except (ValueError, OverflowError):
        pass
    names = {int: "a whole number", float: "a number", str: "a text"}
    raise OptionError(f"{where}: {name}={value!r} is not {names[kind]}")


def convert_switch(name: str, value: Any, where: str) -> bool:
    """A value as true or false; OptionError naming where it stood for anything else."""
    known = {"true": True, "1": True, "on": True, "yes": True, "false": False, "0": False, "off": False, "no": False}
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in known:
        return known[value.strip().lower()]
    raise OptionError(f"{where}: {name}={value!r} is neither true nor false")
