"""Recipes: how to start other servers, as data in `recipes.toml` beside this file."""

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pocketllm.errors import OptionError

FILE = Path(__file__).with_name("recipes.toml")


@cache
def recipes() -> Mapping[str, Mapping[str, Any]]:
    """All recipes by name: about, command, ready, ready_timeout_s and environment."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def find_recipe(name: str, where: str) -> dict[str, Any]:
    """A recipe as the fields of a `Launch`; OptionError lists the known ones."""
    if name not in recipes():
        raise OptionError(f"{where}: no recipe {name!r}; known: {', '.join(recipes())}")
    recipe = recipes()[name]
    return {
        "command": recipe["command"],
        "ready_path": recipe["ready"],
        "ready_timeout_s": float(recipe["ready_timeout_s"]),
        "environment": recipe.get("environment", {}),
    }
