"""What a device draws from are the logits that the host would have seen, of every checkpoint that lies here."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pocketllm.engine.lifecycle.request import Request
from pocketllm.engine.lifecycle.sampling.params import SamplingParams
from pocketllm.engine.load import load_engine, logits_on_device
from pocketllm.engine.options import EngineOptions
from tests.parity.folded import write_folded

CHECKPOINTS = sorted((Path(__file__).parents[1] / "oracles").glob("*.gguf"))
assert CHECKPOINTS, "no checkpoint would be no test"
DRAWER: Any = SimpleNamespace(capped=lambda logits, cap: (logits / cap).tanh() * cap)


@pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda path: path.stem)
def test_logits_left_on_the_device_are_those_of_the_model(path: Path) -> None:
    check(path)


def test_those_of_a_folded_head_are_too(tmp_path: Path) -> None:
    check(write_folded(tmp_path / "folded.gguf", "PQ2_0"))


def check(path: Path) -> None:
    seen: list[Any] = []
    with load_engine(EngineOptions(model=str(path), backend="reference", threads=1, max_model_len=32)) as engine:
        runner: Any = engine.loop._steps.runner
        logits = runner._logits
        runner._logits = lambda hidden: seen.append(hidden) or logits(hidden)
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        engine.loop.submit(Request("r", [1, 2, 3], params), lambda event: None)
        while engine.loop.step():
            pass

        [hidden] = seen
        got = engine.backend.ops.to_numpy(logits_on_device(engine.model, DRAWER, hidden))
        np.testing.assert_allclose(got, engine.model.logits(hidden), rtol=1e-5, atol=1e-7)
