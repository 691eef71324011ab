"""README names every family that runs, so that nobody learns of one from the folder's listing alone."""

from pathlib import Path

import pytest

from pocketllm.engine.models.registry import known_architectures

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("architecture", known_architectures())
def test_readme_names_the_family(architecture: str) -> None:
    assert f"`{architecture}`" in README
