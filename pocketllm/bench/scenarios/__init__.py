"""One file a scenario: what a slot asks of its target. The file name is the name on the command line."""

from importlib import import_module
from pkgutil import iter_modules

from pocketllm.bench.scenarios.contract import Scenario
from pocketllm.errors import OptionError

NOT_SCENARIOS = {"contract", "prompts"}


def known() -> list[str]:
    """Scenario names: the files of this folder, less what all of them share."""
    return sorted(module.name for module in iter_modules(__path__) if module.name not in NOT_SCENARIOS)


def find_scenario(name: str) -> Scenario:
    """The scenario called `name`; OptionError lists the known ones."""
    if name not in known():
        raise OptionError(f"no scenario {name!r}; known: {', '.join(known())}")
    scenario: Scenario = import_module(f"{__name__}.{name}").SCENARIO
    return scenario
