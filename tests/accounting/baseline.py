"""Known failures are a set, compared as a set: a new one is red, and so is a listed one that passes or is gone.

`tests/baseline_failures.txt` has one test id a line; `#` begins a comment. Empty is the goal. A run whose failures are
exactly listed ones ends with 0, and says so.

A pytest plugin; `tests/conftest.py` loads it. Where pytest-xdist spreads the tests over workers, their controller
judges: it hears what every worker collected and reports.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

FILE = Path("tests") / "baseline_failures.txt"
JUDGED = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
"""Ends of a run that says something about every test it ran; an interrupted one stays what it was."""


@dataclass
class Seen:
    """What became of the tests of one run, by their ids."""

    collected: set[str] = field(default_factory=set)
    passed: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Comparison:
    """Failures against the list; everything but `known` is red."""

    known: frozenset[str]
    new: frozenset[str]
    recovered: frozenset[str]
    gone: frozenset[str]

    @property
    def is_green(self) -> bool:
        return not (self.new or self.recovered or self.gone)


def compare(listed: frozenset[str], seen: Seen, is_whole: bool) -> Comparison:
    """A run against the list; only a run of every test can say that a listed one is gone."""
    return Comparison(
        known=listed & seen.failed,
        new=frozenset(seen.failed - listed),
        recovered=(listed & seen.passed) - seen.failed,
        gone=listed - seen.collected - seen.failed if is_whole else frozenset(),
    )


def read_list(file: Path) -> frozenset[str]:
    """The listed test ids; none where there is no such file."""
    if not file.is_file():
        return frozenset()
    lines = (line.partition(" #")[0].strip() for line in file.read_text(encoding="utf-8").splitlines())
    return frozenset(line for line in lines if line and not line.startswith("#"))


class Baseline:
    """Watches one run and gives it its exit code."""

    def __init__(self, config: pytest.Config) -> None:
        self.listed = read_list(config.rootpath / FILE)
        self.is_whole = config.args_source is not pytest.Config.ArgsSource.ARGS and not config.getoption("keyword")
        self.seen = Seen()
        self.result: Comparison | None = None

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        self.seen.collected.add(item.nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self.seen.collected.update(ids)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.seen.failed.add(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.seen.failed.add(report.nodeid)
        elif report.passed and report.when == "call":
            self.seen.passed.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus in JUDGED and self.listed:
            self.result = compare(self.listed, self.seen, self.is_whole and not session.shouldfail)
            session.exitstatus = pytest.ExitCode.OK if self.result.is_green else pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.result is None:
            return
        terminalreporter.section(f"against {FILE.as_posix()}")
        for ids, what in (
            (self.result.new, "fails and is not listed"),
            (self.result.recovered, "is listed and passes: take it off the list"),
            (self.result.gone, "is listed and is no test: take it off the list"),
            (self.result.known, "fails, as listed"),
        ):
            for test in sorted(ids):
                terminalreporter.write_line(f"{test} {what}")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return  # a worker sees a share of the tests, and its exit code is nobody's
    config.pluginmanager.register(Baseline(config), "baseline-failures")
