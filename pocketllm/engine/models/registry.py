"""Find a model family by the architecture that a checkpoint names: the file name is the key."""

import re
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import cast

from pocketllm.engine.models import families
from pocketllm.engine.models.contract import ModelFamily

SPELLED = re.compile(r'^ARCHITECTURE = "(.+)"$', re.MULTILINE)


@cache
def known_architectures() -> tuple[str, ...]:
    """Architectures with a family file, as GGUF spells them; imports none of the files."""
    files = (Path(folder) / f"{file.name}.py" for folder in families.__path__ for file in iter_modules([folder]))
    return tuple(sorted(map(spelling, files)))


def spelling(file: Path) -> str:
    """A family file's architecture: its constant, as a `_` of the name may be one of GGUF's; without one, the name."""
    found = SPELLED.search(file.read_text(encoding="utf-8"))
    return found[1] if found else file.stem.replace("_", "-")


def find_family(architecture: str) -> ModelFamily:
    """The family of an architecture, GGUF's `-` written `_` in the file name.

    LookupError listing what is known when there is no such file; a file that fails to import fails with its own error.
    """
    if architecture not in known_architectures():
        raise LookupError(f"no model family {architecture!r}; known: {', '.join(known_architectures())}")
    return cast(ModelFamily, import_module(f"{families.__name__}.{architecture.replace('-', '_')}").FAMILY)


def family_or_reason(architecture: str) -> ModelFamily | str:
    """The family of an architecture, or the sentence that says which ones there are."""
    try:
        return find_family(architecture)
    except LookupError as error:
        return str(error.args[0])
