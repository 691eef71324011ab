"""A family declares every operation that it calls: one left out is refused by no plan where a backend lacks it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pocketllm.engine.backends.select import BackendOptions, select_backend
from pocketllm.engine.models.registry import find_family, known_architectures
from pocketllm.engine.weights.checkpoint import open_checkpoint
from tests.golden.tiny_suite import checkpoint
from tests.parity.drive import Driver, chunks

WAY_TO_LOAD = "load_stored"
"""Not an operation that a family needs: a backend without it is given bytes."""


class Declared:
    """The reference backend's operations, without those that are not named."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names, self.ops = names, select_backend("reference", BackendOptions(threads=1)).ops

    def __getattr__(self, name: str) -> Any:
        if name == WAY_TO_LOAD:
            raise AttributeError(name)
        assert name in self.names, f"{name} is called and not declared"
        return getattr(self.ops, name)


@pytest.mark.parametrize("architecture", known_architectures())
def test_a_family_calls_no_operation_that_it_does_not_declare(architecture: str, tmp_path: Path) -> None:
    path = checkpoint(architecture, tmp_path)
    with open_checkpoint(path) as opened:
        declared = Declared(find_family(architecture).capability.ops_of(opened.metadata))
    [logits] = Driver(path, ops=declared).run([list(range(20, 60))], chunks(40, 30))

    assert np.isfinite(logits).all()
