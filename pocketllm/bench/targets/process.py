"""An arm as a process of its own: this engine (of this or another checkout) or any server by command line, over HTTP.

The measuring client and the clock are the same for every arm; what differs is what answers. A start is launched, asked
whether it is what was meant, and ended by its process group.
"""

import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pocketllm.bench.arm import Arm
from pocketllm.bench.arm.checkout import Checkout
from pocketllm.bench.arm.settings import Launch, fill
from pocketllm.bench.targets.openai_http import OpenAIHTTPTarget
from pocketllm.engine.options import ENVIRONMENT_PREFIX, EngineOptions, as_flag
from pocketllm.errors import NotJudgedError, OptionError
from pocketllm.golden.served_path import STOP_TIMEOUT_S, Server, ready_or_stopped

TOLD = re.compile(
    r"^(POCKETLLM|OMP|KMP|GOMP|MKL|OPENBLAS|TORCH|CUDA|NCCL|GGML|LLAMA|VLLM|SGLANG|OLLAMA|HF_HUB|MALLOC)_|^LD_PRELOAD$"
)
"""Environment variables that a record tells: those that change how an engine runs."""
SECRET = re.compile(r"key|token|secret|password|user|host|addr|_ip$|_id$", re.IGNORECASE)
"""Of those, what names a credential, a person or a machine."""
OWN_KEYS = ("POCKETLLM_API_KEY",)
"""Variables that an arm's server must not inherit: it would ask the benchmark for a key."""
WITHOUT_FLAG = frozenset({"test_step_delay"})
"""Options that `serve` takes from the environment alone."""


@dataclass(frozen=True)
class Site:
    """What all arms of a run share: the model, and where their logs go."""

    model_path: Path
    model_name: str
    options: EngineOptions
    logs: Path
    run: str
    """Begins the name of each log."""

    @property
    def num_threads(self) -> int:
        """What `{threads}` means: as many as this engine would use."""
        return self.options.threads or len(os.sched_getaffinity(0))


class ProcessTarget(OpenAIHTTPTarget):
    """A server that was started for one arm and one start; `close` ends it."""

    def __init__(
        self, server: Server, command: Sequence[str], facts: Mapping[str, Any], model: str | None, weights: Path
    ) -> None:
        super().__init__(server.url, model, pid=server.pid)
        self.server = server
        self.command = command
        self.facts = facts
        self.weights = weights

    def describe(self) -> Mapping[str, Any]:
        """With how it was started; the port differs from start to start and is not told."""
        return {**super().describe(), **self.facts, "argv": list(self.command), "log": self.server.log_path.name}

    def fingerprint(self) -> str:
        """Of what it serves, the weights and, where that is a checkout, the code that it was started from."""
        told = {key: value for key, value in self.model_entry().items() if key != "created"}
        weights = self.weights.stat()
        parts = [told, weights.st_size, weights.st_mtime_ns, self.facts.get("package_sha256")]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

    def close(self) -> None:
        super().close()
        self.server.stop(STOP_TIMEOUT_S)


def start_arm(arm: Arm, site: Site, start: int) -> ProcessTarget:
    """Launch an arm and wait until it can be asked; NotJudgedError with the end of its log when it cannot."""
    log_path = site.logs / f"{site.run}-{arm.name}-{start}.log"
    if arm.launch is not None:
        server, command = launch_server(arm, arm.launch, site, log_path)
        facts: dict[str, Any] = {"recipe": arm.launch.recipe} if arm.launch.recipe else {}
    else:
        server, command, facts = launch_engine(arm, site, log_path)
    facts["environment"] = told_environment({**os.environ, **arm.environment, **launch_environment(arm, {})})
    try:
        wanted = site.model_name if arm.launch is not None and "{model_name}" in arm.launch.command else None
        target = ProcessTarget(server, command, facts, wanted, site.model_path)
        if arm.launch is None:
            check_engine(arm, target)
    except BaseException:
        server.stop(timeout_s=5)
        raise
    return target


def launch_server(arm: Arm, launch: Launch, site: Site, log_path: Path) -> tuple[Server, list[str]]:
    """Any server by command line, on a free port where it asks for one. The command is given back with its port."""
    values = {
        "model_path": str(site.model_path),
        "model_name": site.model_name,
        "port": str(free_port()),
        "threads": str(site.num_threads),
    }
    command = launch.words(values)
    require_program(arm.name, command[0])
    # a command without a port announces its address in its log, as ours does
    listens = "{port}" in launch.command or any("{port}" in value for value in launch.environment.values())
    server = Server(
        command,
        url=f"http://127.0.0.1:{values['port']}" if listens else "",
        ready_path=launch.ready_path,
        log_path=log_path,
        environment=child_environment(arm, values),
        ready_timeout_s=launch.ready_timeout_s,
    )
    return named(arm, server), launch.words({**values, "port": "{port}"})


def launch_engine(arm: Arm, site: Site, log_path: Path) -> tuple[Server, list[str], dict[str, Any]]:
    """`pocketllm serve` of this checkout or another, with what was said of its options."""
    checkout = Checkout.at(arm.name, arm.path) if arm.path else Checkout.ours()
    said = engine_settings(arm, site)
    flags = [as_flag(name, value) for name, value in said.items() if name not in WITHOUT_FLAG]
    command = checkout.command("serve", *flags, "--port=0")
    extra = {ENVIRONMENT_PREFIX + name.upper(): str(value) for name, value in said.items() if name in WITHOUT_FLAG}
    server = Server(command, log_path=log_path, environment={**child_environment(arm, {}), **extra})
    facts = {"code": dict(checkout.code()), "package_sha256": checkout.package_sha256()}
    return named(arm, server), ["pocketllm", "serve", *flags], facts


def engine_settings(arm: Arm, site: Site) -> dict[str, Any]:
    """Options that were given, by flag, variable, project file or arm; the model always, as a path."""
    common = {
        name: value
        for name, value in site.options.as_dict().items()
        if value is not None and site.options.sources.get(name, "default") != "default"
    }
    return {**common, "model": str(site.model_path), **arm.options}


def named(arm: Arm, server: Server) -> Server:
    """The server once it is ready; the failure of another names the arm."""
    try:
        return ready_or_stopped(server)
    except NotJudgedError as error:
        raise NotJudgedError(f"arm {arm.name}: {error}") from error


def check_engine(arm: Arm, target: ProcessTarget) -> None:
    """NotJudgedError when the plan that a server tells is not what the arm asked for."""
    plan = target.describe().get("plan") or {}
    told = {**(plan.get("options") or {}), **plan}
    for name, value in arm.options.items():
        if name not in ("model", "backend") and told.get(name) != value:
            raise NotJudgedError(f"arm {arm.name} was started with {name}={value}, its plan says {told.get(name)!r}")


def child_environment(arm: Arm, values: Mapping[str, str]) -> dict[str, str]:
    """Our environment without our own keys, with what the arm and its recipe set."""
    inherited = {name: value for name, value in os.environ.items() if name not in OWN_KEYS}
    return {**inherited, **launch_environment(arm, values), **arm.environment}


def launch_environment(arm: Arm, values: Mapping[str, str]) -> dict[str, str]:
    """Variables of the arm's recipe, placeholders filled in."""
    given = arm.launch.environment if arm.launch is not None else {}
    return {name: fill(value, values) for name, value in given.items()}


def told_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The allow-list: variables that change how an engine runs, and no secrets.

    >>> told_environment({"OMP_NUM_THREADS": "2", "HOME": "/root", "VLLM_API_KEY": "x", "VLLM_HOST_IP": "10.0.0.5"})
    {'OMP_NUM_THREADS': '2'}
    """
    return {name: value for name, value in sorted(environment.items()) if TOLD.search(name) and not SECRET.search(name)}


def require_program(arm: str, program: str) -> None:
    """OptionError when the first word of a command is no program here."""
    if shutil.which(program) is None:
        raise OptionError(f"--arms {arm}: no program {program!r} on the PATH")


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
