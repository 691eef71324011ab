"""Find a model family by the architecture that a checkpoint names: the file name is the key."""

from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import cast

from pocketllm.engine.models import families
from pocketllm.engine.models.contract import ModelFamily


@cache
def known_architectures() -> tuple[str, ...]:
    """Architectures with a family file, as GGUF spells them; imports none of the files."""
    return tuple(sorted(module.name.replace("_", "-") for module in iter_modules(families.__path__)))


def find_family(architecture: str) -> ModelFamily:
    """The family of an architecture, GGUF's `-` written `_` in the file name.

    LookupError listing what is known when there is no such file; a file that fails to import fails with its own error.
    """
    name = architecture.replace("-", "_")
    if name.replace("_", "-") not in known_architectures():
        raise LookupError(f"no model family {architecture!r}; known: {', '.join(known_architectures())}")
    return cast(ModelFamily, import_module(f"{families.__name__}.{name}").FAMILY)


def family_or_reason(architecture: str) -> ModelFamily | str:
    """The family of an architecture, or the sentence that says which ones there are."""
    try:
        return find_family(architecture)
    except LookupError as error:
        return str(error.args[0])
