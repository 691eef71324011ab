"""Committed oracles: a tiny checkpoint `oracles/NAME.gguf`, and in `NAME.npz` what somebody else's code makes of it.

What lies there is compared: by the tests of all families, over each backend, and by `python -m tests.parity.record`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.parity.tiny_families import TinyFamily, write_family

ORACLES = Path(__file__).parents[1] / "oracles"
TRANSFORMERS = ("transformers", "5.24.0")
"""Who made the logits of an oracle that does not say, and its release."""
NUM_TOKENS = 48
"""Prompt of a checkpoint that all tests take: they cut it into pieces of their own."""


def checkpoints() -> tuple[str, ...]:
    """Names of the checkpoints that are committed with their logits."""
    return tuple(sorted(path.stem for path in ORACLES.glob("*.gguf")))


def keep_oracle(
    name: str,
    spec: TinyFamily,
    ask: Callable[[Path, list[int]], npt.NDArray[np.floating]],
    made_by: tuple[str, str],
) -> None:
    """Commit-ready files of a checkpoint and its logits.

    ask: these logits, [tokens, vocab], of a file and ids; made_by: whose code that is, and its release.
    """
    ids = np.random.RandomState(spec.seed + 1000).randint(0, 512, NUM_TOKENS)
    logits = ask(write_family(ORACLES / f"{name}.gguf", spec), ids.tolist())
    np.savez_compressed(
        ORACLES / f"{name}.npz", input_ids=ids, logits=logits.astype(np.float32), made_by=np.array(made_by)
    )
    print(f"{name}.gguf, {name}.npz")


def who_made(oracle: Mapping[str, Any]) -> tuple[str, str]:
    """Whose code made a committed oracle's logits, and its release."""
    if "made_by" not in oracle:
        return TRANSFORMERS
    who, release = oracle["made_by"].tolist()
    return who, release
