"""Who made a record, with which code, on what machine. An unreadable fact is absent, never guessed.

Host names, user names and paths of the machine never enter a record: paths shrink to file names, credentials and URL
queries are dropped, the host of a URL that is not loopback is hashed.
"""

import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

TOOL = "pocketllm"
PACKAGES = (
    *("numpy", "torch", "triton", "gguf", "tokenizers", "jinja2", "fastapi", "uvicorn"),
    *("pydantic", "httpx", "pyarrow", "pandas", "scipy", "psutil", "transformers"),
)
"""Distributions whose version can change what is measured or proved."""

ISA_FLAGS = {
    *("sse4_2", "avx", "avx2", "f16c", "fma", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16"),
    *("avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2", "sme"),
}
"""Instruction set flags that kernels choose by."""

SECRET_FLAG = re.compile(
    r"^-{0,2}[\w-]*(api[-_]?key|password|secret|authorization|header)$|^-H$|^--?(\w+[-_])?token$", re.I
)
SECRET_KEY = re.compile(r"(api[-_]?key|password|secret|authorization)$", re.I)
SECRET_VALUE = re.compile(r"\b(?:sk|hf|ghp|gho|glpat|xox[bp])[-_][A-Za-z0-9_\-]{12,}|(?<=Bearer )\S+", re.I)
SECRET_PAIR = re.compile(
    r"\b([\w-]*(?:api[-_]?key|password|secret|authorization|auth_token))([=:]\s*)([^\s,;&]+)", re.I
)
URL = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s\"'<>,]+", re.I)
ABSOLUTE_PATH = re.compile(r"(?<![\w./:~<\\-])(?:~|(?=/))(?:/[^\s/:,;=\"'()<>\[\]{}|]+)+/?")
REDACTED = "***"


def collect(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run document keys `tool`, `argv`, `code` (with package versions) and `machine`; takes tens of milliseconds."""
    version = package_versions((TOOL,)).get(TOOL)
    return {
        "tool": {"name": TOOL} | ({"version": version} if version else {}),
        "argv": redact(sys.argv if argv is None else argv),
        "code": {**code_facts(), "python": platform.python_version(), "packages": package_versions()},
        "machine": {"hard": hard_facts(), "volatile": volatile_facts()},
    }


# -- what must not be told ---------------------------------------------------------------------------------------------
def redact(argv: Sequence[str]) -> list[str]:
    """A command line without credentials, paths, URL queries or foreign host names; as long as the given one."""
    told: list[str] = []
    secret_follows = False
    for position, word in enumerate(argv):
        name, equals, _ = word.partition("=")
        if secret_follows:
            told.append(REDACTED)
            secret_follows = False
        elif position == 0:
            told.append(Path(word).name)
        elif SECRET_FLAG.match(name):
            told.append(f"{name}={REDACTED}" if equals else word)
            secret_follows = not equals and name.startswith("-")
        else:
            told.append(scrub_text(word))
    return told


def scrub(value: Any) -> Any:
    """A JSON-like value with every text in it passed through scrub_text; keys stay."""
    if isinstance(value, str):
        return scrub_text(value)
    if isinstance(value, Mapping):
        return {key: REDACTED if secret(key, item) else scrub(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [scrub(item) for item in value]
    return value


def secret(key: Any, value: Any) -> bool:
    """Whether a document entry is a credential by its name."""
    return isinstance(value, str) and bool(value) and bool(SECRET_KEY.search(str(key)))


def scrub_text(text: str) -> str:
    """A text whose paths are file names, whose URLs carry no user, query or foreign host, without credentials."""
    if "/" not in text and "=" not in text and ":" not in text and not SECRET_VALUE.search(text):
        return text
    told: list[str] = []
    end = 0
    for url in URL.finditer(text):
        told += (scrub_words(text[end : url.start()]), redact_url(url.group()))
        end = url.end()
    return "".join((*told, scrub_words(text[end:])))


def scrub_words(text: str) -> str:
    """scrub_text of a text without URLs."""
    text = SECRET_VALUE.sub(REDACTED, text)
    text = SECRET_PAIR.sub(lambda match: match.group(1) + match.group(2) + REDACTED, text)
    return ABSOLUTE_PATH.sub(lambda match: shorten_path(match.group()), text)


def shorten_path(path: str) -> str:
    """The file name of a path of this machine; a text that only looks like one (`/v1/completions`) stays.

    It is a path of this machine when it begins with `~` or its first folder exists here.
    """
    parts = path.rstrip("/").split("/")
    if path.startswith("~") or (len(parts) > 1 and parts[1] and os.path.isdir("/" + parts[1])):
        return parts[-1]
    return path


def redact_url(url: str) -> str:
    """A URL without user, password, query and fragment; a host that is not this machine is hashed, a file: its name."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return f"{url.partition('://')[0]}://{REDACTED}"
    if parts.scheme == "file":
        return f"file:{Path(parts.path).name}"
    if host and host not in ("localhost", "::1", "0.0.0.0") and not host.startswith("127."):
        host = "host-" + hashlib.sha256(host.encode()).hexdigest()[:8]
    if ":" in host:
        host = f"[{host}]"
    return f"{parts.scheme}://{host}{f':{port}' if port else ''}{parts.path}"


# -- code --------------------------------------------------------------------------------------------------------------
def code_facts() -> dict[str, Any]:
    """Commit of the running source tree, whether it differs from it, and a digest of the difference.

    Empty when the package does not run from a git checkout that tracks it. `records/` does not count as a difference.
    """
    package = Path(__file__).resolve().parents[1]
    if git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return {}
    commit = git(package, "rev-parse", "HEAD")
    top = git(package, "rev-parse", "--show-toplevel")
    if commit is None or top is None:
        return {}
    facts: dict[str, Any] = {"commit": commit.decode().strip()}
    root = Path(os.fsdecode(top.rstrip(b"\n")))
    difference = git(root, "diff", "HEAD", "--binary", "--no-ext-diff", "--", ".", ":(exclude)records")
    untracked = git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", ".", ":(exclude)records")
    if difference is None or untracked is None:
        return facts
    facts["dirty"] = bool(difference or untracked)
    if facts["dirty"]:
        facts["diff_sha256"] = difference_digest(root, difference, untracked)
    return facts


def difference_digest(root: Path, difference: bytes, untracked: bytes) -> str:
    """Digest of a tracked difference plus the names and contents of untracked files."""
    digest = hashlib.sha256(difference)
    for name in sorted(filter(None, untracked.split(b"\0"))):
        digest.update(b"\0" + name + b"\0")
        try:
            with (root / os.fsdecode(name)).open("rb") as file:
                while piece := file.read(1 << 20):
                    digest.update(piece)
        except OSError:
            digest.update(b"unreadable")
    return digest.hexdigest()


def git(folder: Path, *words: str) -> bytes | None:
    """Output of a read-only git command, or None when it cannot be had."""
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, timeout=20, env=environment, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def package_versions(names: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Installed versions of distributions, from their metadata: nothing is imported."""

    def versions() -> Iterator[tuple[str, str]]:
        for name in names:
            try:
                yield name, importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue

    return dict(versions())


# -- machine -----------------------------------------------------------------------------------------------------------
def hard_facts() -> dict[str, Any]:
    """What only a screwdriver (or another allotment of cores) changes; a history holds runs whose facts are equal."""
    import psutil

    return readable(
        {
            "architecture": lambda: platform.machine() or None,
            "cpu": cpu_name,
            "cores_physical": lambda: psutil.cpu_count(logical=False),
            "cores_logical": lambda: psutil.cpu_count(logical=True),
            "cores_usable": lambda: len(os.sched_getaffinity(0)),
            "cpu_quota_cores": cpu_quota_cores,
            "memory_gib": lambda: round(psutil.virtual_memory().total / 2**30),
            "isa": isa_flags,
            "gpus": gpu_names,
        }
    )


def volatile_facts() -> dict[str, Any]:
    """What may differ between two runs on the same hardware."""
    import psutil

    cpu = Path("/sys/devices/system/cpu")
    return readable(
        {
            "os": lambda: platform.freedesktop_os_release().get("PRETTY_NAME") or platform.system(),
            "kernel": lambda: platform.release() or None,
            "governor": lambda: read_line(cpu / "cpu0/cpufreq/scaling_governor"),
            "turbo_off": lambda: read_line(cpu / "intel_pstate/no_turbo") == "1",
            "cpu_freq_mhz": lambda: round(psutil.cpu_freq().current) or None,
            "load_1m": lambda: round(os.getloadavg()[0], 2),
            "memory_available_gib": lambda: round(psutil.virtual_memory().available / 2**30, 1),
            "on_mains": lambda: psutil.sensors_battery().power_plugged,
            "throttle_count": lambda: throttle_count(cpu),
            "gpu_driver": lambda: read_line(Path("/sys/module/nvidia/version")),
        }
    )


def readable(facts: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """The facts that could be read; a reader that fails or finds None leaves its fact out."""
    found: dict[str, Any] = {}
    for name, read in facts.items():
        try:
            value = read()
        except (OSError, AttributeError, ValueError, NotImplementedError, RuntimeError):
            continue
        if value is not None:
            found[name] = value
    return found


def read_line(path: Path) -> str:
    """The first line of a system file; OSError when there is none."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    if not lines or not lines[0].strip():
        raise OSError(f"{path} is empty")
    return lines[0].strip()


def cpu_name() -> str | None:
    """The processor's own name, spaces folded."""
    if sys.platform == "darwin":
        words = ["sysctl", "-n", "machdep.cpu.brand_string"]
        try:
            return subprocess.run(words, capture_output=True, text=True, timeout=5, check=True).stdout.strip() or None
        except subprocess.SubprocessError:
            return None
    return next((" ".join(value.split()) for value in cpuinfo("model name")), None)


def cpuinfo(key: str) -> Iterator[str]:
    """Values of one key in /proc/cpuinfo."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key and value.strip():
            yield value.strip()


def isa_flags() -> list[str] | None:
    """Those of the processor's flags that kernels choose by, sorted."""
    flags = next(cpuinfo("flags"), None) or next(cpuinfo("Features"), None)
    return None if flags is None else sorted(ISA_FLAGS & set(flags.split()))


def cpu_quota_cores() -> float | None:
    """Cores' worth of time that the control group allows; None without a limit."""
    quota, period = read_line(Path("/sys/fs/cgroup/cpu.max")).split()
    return None if quota == "max" else round(int(quota) / int(period), 2)


def gpu_names() -> list[str] | None:
    """NVIDIA GPU names as the kernel driver tells them; no vendor library is loaded."""
    texts = [
        file.read_text(encoding="utf-8") for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    ]
    lines = [line.partition(":") for text in texts for line in text.splitlines()]
    return [name.strip() for key, _, name in lines if key == "Model"] or None


def throttle_count(cpu: Path) -> int | None:
    """Thermal throttle events of all cores since boot."""
    files = list(cpu.glob("cpu[0-9]*/thermal_throttle/core_throttle_count"))
    return sum(int(read_line(file)) for file in files) if files else None
