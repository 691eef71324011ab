"""The CPU backend for tests, where its native library was built; where it was not, they skip, unless it is required."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pocketllm.engine.backends.cpu import library
from pocketllm.engine.models.registry import find_family
from pocketllm.engine.weights.checkpoint import open_checkpoint
from pocketllm.errors import UnsupportedFeatureError

MISSING = f"its native library was not built: {library.REMEDY}"
"""The reason under `without_native`, whatever came of the build here."""


@cache
def why_not() -> str:
    """Why the library cannot be used; empty when it can."""
    try:
        library.open_library()
    except UnsupportedFeatureError as error:
        return str(error)
    return ""


def must_run() -> bool:
    """CI's word that there is no excuse for a missing library."""
    return os.environ.get("POCKETLLM_NATIVE") == "require"


needs_native = pytest.mark.skipif(bool(why_not()) and not must_run(), reason=f"native-library-missing: {why_not()}")


def usable_isas() -> tuple[str, ...]:
    """Instruction sets to test, best first; `none` where there is no library, which `cpu_ops` skips."""
    return ("none",) if why_not() else library.usable_isas()


def cpu_ops(threads: int = 1, **settings: Any) -> Any:
    """CpuOps with these settings; skips with a machine-readable reason where the library was not built."""
    if why_not() and not must_run():
        pytest.skip(f"native-library-missing: {why_not()}")
    from pocketllm.engine.backends.cpu.ops import CpuOps

    return CpuOps(threads, **settings)


def family_ops(path: Path, threads: int = 1, **settings: Any) -> Any:
    """CpuOps as the engine opens them for a checkpoint: with the activations that its family needs, unless said."""
    with open_checkpoint(path) as checkpoint:
        needed = find_family(checkpoint.architecture).capability.least_activations
    return cpu_ops(threads, **{"activation_dtype": needed, **settings})


def poison_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have results of operations begin as NaN, so that a value that is not written is seen."""
    # imported first: a module that takes the class by its name must not keep the one of this test
    import_module("pocketllm.engine.backends.cpu.ops")
    from pocketllm.engine.backends.cpu.operations import recorder

    class Poisoned(recorder.Result):
        def __init__(self, *_: Any) -> None:
            self.fill(np.nan)

    monkeypatch.setattr(recorder, "Result", Poisoned)


@contextmanager
def without_native(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the library had not been built."""
    forget_library()
    try:
        with monkeypatch.context() as patch:
            patch.delenv(library.PATH_VARIABLE, raising=False)
            patch.setattr(library, "library_path", lambda: Path(os.devnull, "not-there"))
            patch.setattr(library, "why_missing", lambda: MISSING)
            yield
    finally:
        forget_library()


def forget_library() -> None:
    """Have the library looked for again."""
    library.open_library.cache_clear()
    library.bytes_per_element.cache_clear()
