"""Skips are claims: each has a reason of `REASONS`, they are counted by it, and `--require REASON` allows none of it.

    pytest --require native-library-missing --require model-not-cached:smollm2-135m     # a machine that has both
    pytest --require all

A pytest plugin; `tests/conftest.py` loads it.
"""

import re
from collections import Counter
from collections.abc import Generator
from typing import TypeVar

import pytest

REASONS = {
    "backend-lacks-family": "a backend with every operation of the family",
    "chat-templates-missing": "the folder of chat templates that POCKETLLM_CHAT_TEMPLATES names",
    "chromium-missing": "the browser chromium",
    "dev-full-missing": "/dev/full",
    "file-system-keeps-pages": "a temporary folder that the page cache can be dropped of",
    "git-not-installed": "git",
    "make-not-installed": "make",
    "missing-extra": "an optional package; the detail names it",
    "model-not-cached": "a checkpoint that `pocketllm models pull` fetches",
    "native-library-missing": "the native CPU library, which a C++17 compiler builds at installation",
    "no-aarch64": "an emulated aarch64, which `.ci/aarch64` sets up",
    "no-cpuinfo-flags": "Linux on x86-64, whose /proc/cpuinfo lists what the processor can do",
    "no-fixture-for-device": "accepted golden answers of this device class",
    "no-fixture-for-isa": "accepted golden answers of this instruction set",
    "no-golden-for-family": "a tiny checkpoint of the family to ask for golden answers",
    "no-gpu": "an NVIDIA GPU",
    "no-madvise": "madvise with MADV_DONTNEED",
    "no-malloc-trim": "a C library that gives memory back when it is told to, as glibc",
    "no-mincore": "mincore, which tells the pages that are in memory, as on Linux",
    "no-proc": "/proc",
    "no-pseudo-terminal": "pseudo-terminals",
    "no-read-only-folder": "a folder that nobody may write to, as /proc/self",
    "no-sanitizer": "a C++ compiler with sanitizers, on Linux",
    "node-missing": "node",
    "npm-package-missing": "a package of npm; the detail names it",
    "one-instruction-set": "a processor with more than one of the CPU backend's instruction sets",
    "openssl-missing": "the program openssl",
    "otel-missing": "the OpenTelemetry packages",
    "package-missing": "a package that no extra has; the detail names it",
    "program-not-found": "another program; the detail names it",
    "triton-missing": "triton",
}
"""What a skipped test would need, by the word that its reason begins with: `word`, or `word: detail`."""
ALL = "all"
WORD = re.compile(r"[a-z0-9]+(-[a-z0-9]+)+")
Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("accounting").addoption(
        "--require",
        action="append",
        default=[],
        metavar="REASON",
        help=f"fail instead of skipping for this reason, or for this one of its details as REASON:DETAIL "
        f"({', '.join(REASONS)}; or {ALL}); may be repeated",
    )


def pytest_configure(config: pytest.Config) -> None:
    unknown = sorted({asked.partition(":")[0] for asked in config.getoption("--require")} - {*REASONS, ALL})
    if unknown:
        raise pytest.UsageError(f"--require {unknown[0]}: no test skips for it; known: {', '.join(REASONS)}, {ALL}")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return held((yield), item.config)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return held((yield), collector.config)


def held(report: Report, config: pytest.Config) -> Report:
    """The report, failed where it skips for a reason that is required, or for none that a machine can count."""
    reason = reason_of(report)
    if reason is None:
        return report
    if not WORD.fullmatch(word_of(reason)):
        complaint = f"skipped for {reason!r}: a reason begins with a word of tests/accounting/skips.py, then `: detail`"
    elif asked := next(filter(names_of(reason).__contains__, config.getoption("--require")), None):
        complaint = f"skipped for {reason!r}, which --require {asked} does not allow"
    else:
        return report
    report.outcome = "failed"
    report.longrepr = complaint
    return report


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str | None:
    """Why a report is a skip; None for any other, and for an expected failure, which pytest calls skipped too."""
    if not report.skipped or hasattr(report, "wasxfail") or not isinstance(report.longrepr, tuple):
        return None
    return report.longrepr[2].removeprefix("Skipped").removeprefix(": ")


def word_of(reason: str) -> str:
    """The machine-readable part of a reason.

    >>> word_of("model-not-cached: smollm2-135m (pocketllm models pull smollm2-135m)"), word_of("no-proc")
    ('model-not-cached', 'no-proc')
    """
    return reason.partition(": ")[0]


def names_of(reason: str) -> list[str]:
    """What `--require` may call a reason: its word, with the first word of its detail, or everything.

    >>> names_of("model-not-cached: smollm2-135m (pocketllm models pull smollm2-135m)")
    ['all', 'model-not-cached', 'model-not-cached:smollm2-135m']
    """
    word, _, detail = reason.partition(": ")
    return [ALL, word, *(f"{word}:{first}" for first in detail.split()[:1])]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reasons = filter(None, map(reason_of, terminalreporter.stats.get("skipped", ())))
    counts = Counter(map(word_of, reasons))
    if counts:
        terminalreporter.section("skips by reason")
    for word, count in sorted(counts.items(), key=lambda counted: (-counted[1], counted[0])):
        terminalreporter.write_line(
            f"{count:5} {word}: needs {REASONS.get(word, 'what nobody has put into words yet')}"
        )
