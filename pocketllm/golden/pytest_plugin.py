"""pytest plugin: `pytest --golden records/fixtures` collects every case and path of accepted fixtures as a test.

A checkpoint is one folder of the fixtures, found by its name in the catalog or where `--golden-model NAME=PATH` says.
Everything that is selected of a checkpoint is asked in one go, when its first test runs: one engine, one server.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pocketllm.errors import PocketLLMError

if TYPE_CHECKING:
    from pocketllm.golden.fixture import Case, ServedPath
    from pocketllm.golden.judging.judge import Row
    from pocketllm.golden.subject import Subject

NO_FIXTURE = "no-fixture-for-device"
NOT_CACHED = "model-not-cached"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The flags of a golden run."""
    group = parser.getgroup("pocketllm golden")
    group.addoption("--golden", metavar="FOLDER", type=Path, help="collect golden fixtures, such as records/fixtures")
    group.addoption(
        "--golden-model",
        metavar="NAME=PATH",
        action="append",
        default=[],
        help="where the checkpoint of a fixture folder lies; repeatable, default: the catalog's cache",
    )
    group.addoption("--golden-backend", metavar="NAME", default=None, help="backend of the engine, default: auto")
    group.addoption("--golden-strict-ties", action="store_true", help="a tie fails")
    group.addoption("--golden-require", action="store_true", help="a missing model or answer fails instead of skipping")


class NotGreen(Exception):  # noqa: N818  # an outcome, not an error
    """How a test of ours ends that is not green, in words to be shown without a traceback."""


@dataclass
class Suite:
    """One checkpoint with all its tests: what is selected of it is asked at once, and kept."""

    name: str
    folder: Path
    model: str
    backend: str | None
    selected: set[tuple[str, str]] = field(default_factory=set)
    """(case, path) of the tests that will run."""

    @cached_property
    def subject(self) -> "Subject":
        from pocketllm.engine.options import resolve_options
        from pocketllm.golden.subject import open_subject

        subject = open_subject(resolve_options({"model": self.model, "backend": self.backend}))
        return replace(subject, name=self.name)

    @cached_property
    def rows(self) -> "dict[tuple[str, str], list[Row]]":
        """Judged rows by case and path; endings and scores count with the path they were asked along."""
        from pocketllm.golden.files.folder import FixtureFolder
        from pocketllm.golden.judging.judge import judge

        folder = FixtureFolder(self.folder)
        cases = [replace(case, paths=self._chosen(case)) for case in folder.cases()]
        found: dict[tuple[str, str], list[Row]] = {}
        for row in judge(self.subject, folder, [case for case in cases if case.paths]):
            found.setdefault(self._owner(row), []).append(row)
        return found

    def _chosen(self, case: "Case") -> "tuple[ServedPath, ...]":
        return tuple(path for path in case.paths if (case.name, str(path)) in self.selected)

    def _owner(self, row: "Row") -> tuple[str, str]:
        """The test that a row belongs to: its own path's, else the first of its case through that entry point."""
        key = (row.case, str(row.path))
        if row.check == "tokens" and key in self.selected:
            return key
        own = sorted(path for case, path in self.selected if case == row.case)
        return row.case, next((path for path in own if path.startswith(row.path.entry_point)), own[0])


class GoldenItem(pytest.Item):
    """One case along one path."""

    def __init__(self, *, suite: Suite, case: "Case", path: "ServedPath", **words: Any) -> None:
        super().__init__(**words)
        self.suite = suite
        self.case = case
        self.key = (case.name, str(path))
        self.add_marker("golden")

    def setup(self) -> None:
        """Skip where there is nothing to run or to compare with; both reasons are machine-readable."""
        from pocketllm.errors import ModelNotFoundError
        from pocketllm.golden.files.folder import FixtureFolder

        try:
            key = self.suite.subject.hard_key
        except ModelNotFoundError as error:
            self._absent(f"{NOT_CACHED}: {self.suite.name} ({error})")
        except PocketLLMError as error:
            raise NotGreen(str(error)) from None
        if not any(FixtureFolder(self.suite.folder).path.glob(f"*.{key.label}.json")):
            self._absent(f"{NO_FIXTURE}: {key.label}")

    def _absent(self, reason: str) -> None:
        if self.config.getoption("--golden-require"):
            raise NotGreen(reason)
        pytest.skip(reason)

    def runtest(self) -> None:
        """Judge the rows of this test; the first that is not green is told."""
        from pocketllm.golden.compare import exit_code
        from pocketllm.golden.judging.words import explain

        strict_ties = bool(self.config.getoption("--golden-strict-ties"))
        try:
            rows = self.suite.rows.get(self.key, [])
        except PocketLLMError as error:
            raise NotGreen(str(error)) from None
        if not rows:
            raise NotGreen("NOT JUDGED: nothing came back")
        red = [row for row in rows if exit_code([row.outcome], True, strict_ties=strict_ties)]
        if red:
            text = self.suite.subject.prompts.token_text
            told = (f"{row.path} {row.check}: {row.outcome.word}: {explain(row.outcome, text)}" for row in red)
            raise NotGreen("\n".join(told))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Our own sentences as they are, a bug with its traceback."""
        return str(excinfo.value) if isinstance(excinfo.value, NotGreen) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        """File and headline."""
        return self.path, None, f"golden: {self.suite.name} {self.case.name} {self.key[1]}"


class GoldenFolder(pytest.Collector):
    """All fixtures of one checkpoint."""

    def __init__(self, *, suite: Suite, **words: Any) -> None:
        super().__init__(**words)
        self.suite = suite

    def collect(self) -> Iterator[GoldenItem]:
        """A test for each path of each case; RecordError for a broken fixture."""
        from pocketllm.golden.files.folder import FixtureFolder

        for case in FixtureFolder(self.suite.folder).cases():
            for path in case.paths:
                name = f"{case.name}[{path}]"
                yield GoldenItem.from_parent(self, name=name, suite=self.suite, case=case, path=path)


def pytest_configure(config: pytest.Config) -> None:
    """The marker of our tests."""
    config.addinivalue_line("markers", "golden: a golden fixture, collected by --golden")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Refuse flags that name nothing, before anything is collected."""
    folder = session.config.getoption("--golden")
    if folder is not None and not folder.is_dir():
        raise pytest.UsageError(f"--golden {folder} is no folder of fixtures")
    for words in session.config.getoption("--golden-model"):
        if "=" not in words:
            raise pytest.UsageError(f"--golden-model {words!r} must be NAME=PATH")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add our tests to whatever else was collected, before others deselect."""
    folder: Path | None = config.getoption("--golden")
    if folder is None:
        return
    models = dict(words.split("=", 1) for words in config.getoption("--golden-model"))
    for path in sorted(one for one in folder.iterdir() if one.is_dir()):
        suite = Suite(path.name, path, models.get(path.name, path.name), config.getoption("--golden-backend"))
        collector = GoldenFolder.from_parent(session, name=path.name, path=path, suite=suite)
        try:
            items += list(collector.collect())
        except PocketLLMError as error:
            raise pytest.UsageError(str(error)) from None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Know what is left after -k, -m and their like: nothing else is asked."""
    for item in session.items:
        if isinstance(item, GoldenItem):
            item.suite.selected.add(item.key)
