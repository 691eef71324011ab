"""Engine options: one frozen object, each value with its provenance (flag > environment > project file > default)."""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from pocketllm.errors import OptionError

ENVIRONMENT_PREFIX = "POCKETLLM_"
PROJECT_FILE = "pocketllm.toml"
DEFAULT_MODEL = "smollm2-135m"

SWITCHABLE = frozenset({"max_num_seqs", "max_num_batched_tokens", "prefill_chunk", "watermark", "reserve"})
"""Options of the scheduler, which a second loop over the same loaded weights can have otherwise (`toggle` arms)."""


@dataclass(frozen=True)
class EngineOptions:
    """What the user said; None means `not said, resolve it` and the plan shows what it became."""

    model: str = DEFAULT_MODEL
    backend: str = "auto"
    max_model_len: int | None = None
    """Longest prompt plus answer of one request, in tokens; None: the checkpoint's context length."""
    max_num_seqs: int = 8
    """Most requests in one step."""
    max_num_batched_tokens: int = 512
    """Token budget of one step over all requests."""
    prefill_chunk: int = 256
    """Most prompt tokens of one request in one step."""
    block_size: int = 16
    """Tokens in one cache block."""
    kv_cache_bytes: int | None = None
    """Memory for keys and values; None: enough for max_num_seqs full requests, at most 1 GiB, at least one request."""
    watermark: float = 0.01
    """Share of blocks that admission leaves free."""
    reserve: float = 1.0
    """Share of the running requests' possible growth that admission keeps free; below 1 a request may be recomputed."""
    max_queued_requests: int = 256
    """Requests that may wait before the queue refuses."""
    threads: int | None = None
    """CPU threads; None: the cores this process may use."""
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Where each value came from: flag, environment, file or default."""

    def __post_init__(self) -> None:
        for name in ("max_model_len", "kv_cache_bytes", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"{name}={value} must be at least 1")
        for name in ("max_num_seqs", "max_num_batched_tokens", "prefill_chunk", "block_size", "max_queued_requests"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("watermark", "reserve"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise OptionError(f"{name}={getattr(self, name)} must be between 0 and 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise OptionError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs}: "
                "every running request needs one token a step"
            )

    def as_dict(self) -> dict[str, Any]:
        """Values by name, for plans and records."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "sources"}


def resolve_options(
    flags: Mapping[str, Any], environment: Mapping[str, str] | None = None, directory: Path | None = None
) -> EngineOptions:
    """Merge flags (None: not given), POCKETLLM_* variables, ./pocketllm.toml and defaults, most explicit first.

    Raises OptionError naming the place of a value that cannot be used, or of an unknown key.
    """
    environment = os.environ if environment is None else environment
    file_values = read_project_file((directory or Path.cwd()) / PROJECT_FILE)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for item in fields(EngineOptions):
        if item.name == "sources":
            continue
        variable = ENVIRONMENT_PREFIX + item.name.upper()
        sources[item.name] = "default"
        if flags.get(item.name) is not None:
            values[item.name], sources[item.name] = flags[item.name], "flag"
        elif variable in environment:
            values[item.name] = convert(item.name, environment[variable], variable)
            sources[item.name] = f"environment {variable}"
        elif item.name in file_values:
            values[item.name] = convert(item.name, file_values[item.name], PROJECT_FILE)
            sources[item.name] = f"file {PROJECT_FILE}"
    return EngineOptions(**values, sources=sources)


def read_project_file(path: Path) -> dict[str, Any]:
    """The [engine] table of a project file; empty when there is no file."""
    if not path.is_file():
        return {}
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get("engine", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"{path.name} is not valid TOML: {error}") from error
    known = {item.name for item in fields(EngineOptions)} - {"sources"}
    unknown = sorted(set(table) - known)
    if unknown:
        raise OptionError(f"{path.name}: unknown engine option {unknown[0]!r}; known: {', '.join(sorted(known))}")
    return dict(table)


def convert(name: str, value: Any, where: str) -> Any:
    """A value as the option's type; a text that is not one is an OptionError naming where it stood."""
    wanted = get_type_hints(EngineOptions)[name]
    kind = next(k for k in (int, float, str) if k is wanted or k in getattr(wanted, "__args__", ()))
    try:
        if kind is int and isinstance(value, float):
            raise ValueError(value)
        return kind(value)
    except (TypeError, ValueError) as error:
        raise OptionError(f"{where}: {name}={value!r} is not a {kind.__name__}") from error
