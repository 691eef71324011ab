"""Arms: what is timed, what differs between them, what may be claimed of the difference; and the null arm."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pocketllm.bench.arm.settings import NULL_NAME, Arm, Isolation, Launch, Role, Via, read_arms
from pocketllm.engine.options import EngineOptions
from pocketllm.errors import OptionError

__all__ = [
    "Arm",
    "ArmSet",
    "Isolation",
    "Launch",
    "Role",
    "Via",
    "claim",
    "default_starts",
    "effective_options",
    "leave_client_a_core",
    "make_arms",
    "parse_arm",
]

DEFAULT_STARTS = 5
"""Fresh starts of every arm in `process` isolation; with fewer a verdict speaks of these processes only."""


@dataclass(frozen=True)
class ArmSet:
    """The arms of one run, baseline first and the null arm last (when there is one)."""

    arms: tuple[Arm, ...]
    isolation: Isolation

    @property
    def baseline(self) -> Arm:
        return self.arms[0]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(arm.name for arm in self.arms)

    @property
    def candidates(self) -> tuple[Arm, ...]:
        return tuple(arm for arm in self.arms if arm.role is Role.CANDIDATE)

    @property
    def null(self) -> Arm | None:
        return next((arm for arm in self.arms if arm.role is Role.NULL), None)


def claim(isolation: Isolation, starts: int) -> str:
    """What a verdict of such a run speaks of, in a sentence for readers."""
    match isolation:
        case Isolation.TOGGLE:
            return "options switched in one loaded process; the null arm is the same process relabelled"
        case Isolation.ATTACH:
            return "these endpoints, now; the null arm is the baseline's endpoint relabelled"
        case Isolation.PROCESS:
            null = "the null arm is another copy of the baseline, started like it"
            if starts >= DEFAULT_STARTS:
                return f"these builds and configurations, each arm started afresh {starts} times; {null}"
            times = "once" if starts == 1 else f"{starts} times"
            return f"these processes only: each arm was started {times} ({DEFAULT_STARTS} would say more); {null}"


def default_starts(isolation: Isolation, asked: int | None) -> int:
    """Fresh starts of a run; OptionError where arms are not processes that could be started."""
    if isolation is Isolation.PROCESS:
        if asked is not None and asked < 1:
            raise OptionError(f"--starts {asked} must be at least 1")
        return DEFAULT_STARTS if asked is None else asked
    if asked not in (None, 1):
        why = "these arms share one process" if isolation is Isolation.TOGGLE else "these servers run already"
        raise OptionError(f"--starts {asked}: {why}; via=http gives each arm a process of its own")
    return 1


def make_arms(
    texts: Sequence[str], options: EngineOptions, baseline: str | None = None, with_null: bool = True
) -> ArmSet:
    """Parse, order and check all arms, and add the null arm; the first is the baseline unless `baseline` names one.

    texts: `NAME[:key=value,…]` or the path of a TOML file of arms. Raises OptionError for duplicates, for two arms
    equal in plan, commit and build, and for a mix of kinds of which nothing could be claimed.
    """
    parsed, named = read_arms(texts)
    if len(parsed) < 2 and not with_null:
        raise OptionError("--no-null leaves one arm: nothing to compare; give --arms twice or more")
    if not parsed:
        raise OptionError(
            "no arms: give --arms NAME[:key=value,…] at least once, e.g. --arms base --arms b:prefill_chunk=64"
        )
    check_distinct(parsed, options)
    isolation = isolation_of(parsed)
    first = pick_baseline(parsed, baseline or named)
    if with_null and first.runs_here:
        raise OptionError(
            f"arm {first.name} runs in this process, so its null arm could not be a process of its own: "
            "make another arm the baseline"
        )
    others = [arm for arm in parsed if arm.name != first.name]
    arms = [replace(first, role=Role.BASELINE), *others]
    if with_null:
        arms.append(replace(first, name=NULL_NAME, role=Role.NULL))
    return ArmSet(tuple(arms), isolation)


CLIENT_S_CORE = "default: one core is the client's"
"""Where the number of threads came from, when it was not said and arms are processes."""


def leave_client_a_core(arm_set: ArmSet, options: EngineOptions, num_cores: int) -> EngineOptions:
    """One thread fewer than cores where arms are processes and no number was said.

    The client that asks them needs a core of its own: where engines take them all, its stamps are late and V09 ends the
    run INVALID.
    """
    if arm_set.isolation is not Isolation.PROCESS or options.threads is not None or num_cores < 2:
        return options
    return replace(options, threads=num_cores - 1, sources={**options.sources, "threads": CLIENT_S_CORE})


def parse_arm(text: str) -> Arm:
    """One `--arms` value as an arm. Raises OptionError naming the arm and what is wrong with it.

    >>> parse_arm("chunk-64:prefill_chunk=64").options
    {'prefill_chunk': 64}
    >>> parse_arm("peer:url=http://127.0.0.1:8080").url
    'http://127.0.0.1:8080'
    """
    [arm], _ = read_arms([text])
    return arm


def pick_baseline(arms: Sequence[Arm], name: str | None) -> Arm:
    """The arm called `name`, or the first."""
    if name is None:
        return arms[0]
    for arm in arms:
        if arm.name == name:
            return arm
    raise OptionError(f"--baseline {name!r} is not an arm; arms: {', '.join(arm.name for arm in arms)}")


def isolation_of(arms: Sequence[Arm]) -> Isolation:
    """What the arms need: one process, a process each, or running servers, which cannot be mixed with the rest."""
    with_url = [arm.name for arm in arms if arm.url is not None]
    without = [arm.name for arm in arms if arm.url is None]
    if with_url and without:
        raise OptionError(
            f"arm {with_url[0]} is a running server and arm {without[0]} is not: serve both and give each its url=, "
            "or let both be started here (cmd=, recipe=, via=http)"
        )
    if with_url:
        return Isolation.ATTACH
    return Isolation.TOGGLE if all(arm.is_switchable for arm in arms) else Isolation.PROCESS


class SameCodeError(OptionError):
    """All that is to be compared is two checkouts whose packages, options and interpreters are equal."""


def check_distinct(arms: Sequence[Arm], options: EngineOptions) -> None:
    """Refuse two arms with one name, or that would run the same thing; SameCodeError where two checkouts are equal."""
    seen_names: set[str] = set()
    seen: dict[str, str] = {}
    builds = Builds(needed=any(arm.path is not None for arm in arms))
    for arm in arms:
        if arm.name in seen_names:
            raise OptionError(f"two arms are called {arm.name!r}")
        seen_names.add(arm.name)
        effective = as_run(effective_options(arm, options))
        options_told = sorted(effective.as_dict().items(), key=str)
        # over HTTP is how every process of this engine is asked, said or not
        what = arm.difference() | {"path": builds.of(arm), "options": options_told, "via": arm.runs_here}
        key = str(sorted(what.items()))
        if key in seen:
            raise (SameCodeError if are_two_checkouts(arms) else OptionError)(
                f"arms {seen[key]} and {arm.name} are equal in plan, commit and target: the null arm already measures "
                "that"
            )
        seen[key] = arm.name


def are_two_checkouts(arms: Sequence[Arm]) -> bool:
    """Whether there are two arms, in folders of their own."""
    from pocketllm.bench.arm.checkout import Checkout

    roots = {(Checkout.at(arm.name, arm.path) if arm.path else Checkout.ours()).root for arm in arms}
    return len(arms) == 2 == len(roots)


def effective_options(arm: Arm, options: EngineOptions) -> EngineOptions:
    """The common options with the arm's own; OptionError for a value out of range, which it says the arm gave."""
    said = dict.fromkeys(arm.options, f"--arms {arm.name}")
    return replace(options, **arm.options, sources={**options.sources, **said})


def as_run(options: EngineOptions) -> EngineOptions:
    """With the backend's own sizes of steps, where they were not said; as they are where no backend would run them.

    Raises OptionError where sizes do not go together.
    """
    from pocketllm.engine.backends.select import AUTO, bids
    from pocketllm.engine.plan import backend_options
    from pocketllm.engine.plan.sizes import sized

    meant = [bid.capability for bid in bids(backend_options(options)) if options.backend in (AUTO, bid.name)]
    first = next((capability for capability in meant if capability is not None), None)
    return options if first is None else sized(options, first.sizes)


class Builds:
    """The code that each arm would run, read only where some arm comes from another checkout."""

    def __init__(self, needed: bool) -> None:
        self.needed = needed

    def of(self, arm: Arm) -> str | None:
        """Digest of the arm's checkout and interpreter; None where nothing could differ."""
        from pocketllm.bench.arm.checkout import Checkout

        if not self.needed or arm.launch is not None or arm.url is not None:
            return None
        return (Checkout.at(arm.name, arm.path) if arm.path else Checkout.ours()).identity()
