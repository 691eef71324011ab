"""Files of the Hugging Face hub, through its own library: its cache, its token and its offline switch apply."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from pocketllm.engine.weights.checkpoint import shard_paths
from pocketllm.engine.weights.fetching import FETCHING
from pocketllm.errors import ModelNotFoundError, OptionError

PREFIX = "hf:"
REACH_S = 5.0
"""The hub's first word must come within; without one the library would ask six times, and wait between."""


def parse(name: str) -> tuple[str, str, str | None]:
    """Repository, file and revision of `hf:owner/repo/path/file.gguf[@revision]`; ModelNotFoundError for any other."""
    rest, _, revision = name.removeprefix(PREFIX).partition("@")
    parts = rest.split("/")
    if len(parts) < 3 or any(part in ("", ".", "..") or "\\" in part for part in parts):
        raise ModelNotFoundError(
            f"{name[:120]!r} is not hf:owner/repo/file.gguf: name the owner, the repository and a file in it"
        )
    return "/".join(parts[:2]), "/".join(parts[2:]), revision or None


def fetch_from_hub(name: str, progress: Callable[[str], None] | None = None) -> Path:
    """The local path of a hub file, downloaded when the hub's cache does not have it; all shards of a split one."""
    repository, file_name, revision = parse(name)
    try:
        import huggingface_hub
    except ModuleNotFoundError as error:
        if error.name != "huggingface_hub":
            raise
        raise OptionError(f"{name[:120]} needs the hub extra: pip install 'pocketllm[hub]'") from None
    shards = shard_paths(Path(PurePosixPath(file_name).name))
    folder = PurePosixPath(file_name).parent
    first: Path | None = None
    for shard in shards:
        found = _download(huggingface_hub, repository, str(folder / shard.name), revision, name, progress)
        first = first or found
    assert first is not None
    return first


@contextmanager
def quiet() -> Iterator[None]:
    """Keep back what the library logs of each of its retries: one sentence follows. A user's HF_HUB_VERBOSITY wins."""
    if "HF_HUB_VERBOSITY" in os.environ:
        yield
        return
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _download(
    library: Any,
    repository: str,
    file_name: str,
    revision: str | None,
    name: str,
    progress: Callable[[str], None] | None = None,
) -> Path:
    from huggingface_hub import constants, errors

    download = library.hf_hub_download  # imports what sets the level of its logger
    try:
        with quiet():
            if not isinstance(library.try_to_load_from_cache(repository, file_name, revision=revision), str):
                size = _reach(library, repository, file_name, revision)
                if progress is not None:
                    progress(f"{FETCHING}{file_name} of {repository} from the hub: {size}, to {constants.HF_HUB_CACHE}")
            return Path(download(repository, file_name, revision=revision))
    except errors.LocalEntryNotFoundError as error:
        raise ModelNotFoundError(
            f"{name}: the hub cannot be reached and the file is not in its local cache; go online, or give a path"
        ) from error
    except errors.GatedRepoError as error:
        raise ModelNotFoundError(
            f"{name}: the repository is gated; accept its terms and set HF_TOKEN to a token that may read it"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"{name}: the hub has no repository {repository}, or HF_TOKEN may not see it"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFoundError(f"{name}: {repository} has no revision {revision}") from error
    except errors.EntryNotFoundError as error:
        raise ModelNotFoundError(f"{name}: {repository} has no file {file_name}") from error
    except Exception as error:
        # its HTTP client, and so the errors of a connection that breaks, change with the library's version; all carry
        # words of their own, first line enough
        words = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelNotFoundError(f"{name}: the hub said no: {words[0][:200]}") from error


def _reach(library: Any, repository: str, file_name: str, revision: str | None) -> str:
    """Ask for a file's headers once and give its size in words; LocalEntryNotFoundError when nobody answers.

    A refusal is left to the download.
    """
    from huggingface_hub import errors

    url = library.hf_hub_url(repository, file_name, revision=revision)
    try:
        size = getattr(library.get_hf_file_metadata(url, timeout=REACH_S), "size", None)
    except errors.HfHubHTTPError:
        size = None
    except Exception as error:  # of an HTTP client that changes, see _download
        raise errors.LocalEntryNotFoundError(str(error)) from error
    return "of a size that it does not tell" if size is None else f"{size / 1e6:.0f} MB"
