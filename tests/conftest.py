"""Fixtures that more than one folder of tests needs."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

from pocketllm.engine.backends.api.device import num_usable_cores

pytest_plugins = ["pytester", "tests.accounting.skips", "tests.accounting.baseline"]

# the same examples in every run, and no failure because the machine was busy
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")

# as the reference backend sets it, for tests that import torch before they open the backend
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

# a worker of pytest-xdist is told how wide the terminal of the run is; what a pipe gets must not depend on it
os.environ.pop("COLUMNS", None)

ORACLES = Path(__file__).parent / "oracles"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: a worker for each core that this process may use."""
    return num_usable_cores()


@pytest.fixture(scope="session")
def tiny_gguf() -> Path:
    """A llama checkpoint of 0.5 MB with random float32 weights and a 512-token vocabulary."""
    return ORACLES / "llama.gguf"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model from the cache; skips with a machine-readable reason where it was never fetched."""
    return cached("smollm2-135m", "SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def gemma3_270m() -> Path:
    """Gemma 3 270M from the cache, where `make test-full` puts it; skips as `smollm2` does."""
    return cached("gemma3-270m", "gemma-3-270m-q4_k_m.gguf")


def cached(name: str, file_name: str) -> Path:
    cache = Path(os.environ.get("POCKETLLM_CACHE", Path.home() / ".cache" / "pocketllm"))
    path = cache / "models" / name / file_name
    if not path.is_file():
        pytest.skip(f"model-not-cached: {name} (pocketllm models pull {name})")
    return path
