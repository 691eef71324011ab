"""Which backend runs: the one place that imports a vendor folder or an entry point, by name, once."""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import cast

from pocketllm.engine.backends.api.backend import Backend, DeviceModule
from pocketllm.engine.backends.api.capability import BackendBid, BackendOptions
from pocketllm.engine.backends.api.device import read_facts
from pocketllm.engine.options import AUTO
from pocketllm.errors import UnsupportedFeatureError

__all__ = [
    "AUTO",
    "Backend",
    "BackendOptions",
    "bids",
    "known_backends",
    "offers",
    "open_backend",
    "require_known",
    "select_backend",
]

GROUP = "pocketllm.backends"
"""Entry points of this group add backends: the name is the backend's, the value its `device` module."""
VENDORS = tuple(
    sorted(path.parent.name for path in Path(__file__).parent.glob("*/device.py") if path.parent.name != "api")
)
"""Every folder here that has a `device` module, the seam's own apart."""
UNASKED = BackendOptions()


@cache
def out_of_tree() -> Mapping[str, EntryPoint]:
    """Installed entry points by backend name; a name taken twice is an error that names both packages."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        if point.name in VENDORS or point.name in found or point.name == AUTO:
            other = found[point.name].value if point.name in found else "pocketllm itself"
            raise UnsupportedFeatureError(
                f"backend {point.name!r}", [f"both {point.value} and {other} claim this name: uninstall one"]
            )
        found[point.name] = point
    return found


def known_backends() -> tuple[str, ...]:
    """Names that `select_backend` answers to, `auto` apart."""
    return (*VENDORS, *sorted(out_of_tree()))


def require_known(name: str, said: str | None = None) -> None:
    """UnsupportedFeatureError listing the known backends when there is none of this name.

    said: the name and where it was said, for the message.
    """
    known = (AUTO, *known_backends())
    if name not in known:
        raise UnsupportedFeatureError(
            said or f"backend {name!r}", [f"no backend has this name; known: {', '.join(known)}"]
        )


def device_module(name: str) -> DeviceModule:
    """Import one backend's `device` module; a package that fails to import fails with its own traceback."""
    if name in VENDORS:
        return cast(DeviceModule, import_module(f"{__package__}.{name}.device"))
    return cast(DeviceModule, out_of_tree()[name].load())


def bids(options: BackendOptions = UNASKED) -> list[BackendBid]:
    """What every installed backend answers on this machine, the one that `auto` takes first."""
    facts = read_facts()
    modules = [device_module(name) for name in known_backends()]
    answers = [(module.bid(facts, options), module.RANK) for module in modules]
    answers.sort(key=lambda answer: (answer[0].capability is None, -answer[1]))
    return [bid for bid, _ in answers]


def offers(name: str, options: BackendOptions = UNASKED) -> list[BackendBid]:
    """The bid of the backend called name, or all of them for `auto`, best first; opens nothing.

    Raises UnsupportedFeatureError with the known names, or with each backend's reason when none of them can run.
    """
    require_known(name)
    answers = bids(options) if name == AUTO else [device_module(name).bid(read_facts(), options)]
    if answers[0].capability is None:
        raise UnsupportedFeatureError(f"backend {name!r}", [f"{bid.name}: {bid.reason}" for bid in answers])
    return answers


def open_backend(name: str, options: BackendOptions = UNASKED) -> Backend:
    """Open a backend that has bid for these options."""
    return device_module(name).open_backend(read_facts(), options)


def select_backend(name: str = AUTO, options: BackendOptions = UNASKED) -> Backend:
    """Open a backend. `auto` takes the best that bids; `Backend.capability.name` says which one it became.

    Raises UnsupportedFeatureError as `offers` does; never another backend than the one asked for.
    """
    return open_backend(offers(name, options)[0].name, options)
