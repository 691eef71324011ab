"""Where fixtures lie: one folder a checkpoint, `<case>.json` beside `<case>.<label>.json`, proposals as `*.pending`."""

import hashlib
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pocketllm.errors import RecordError
from pocketllm.golden.compare import Stale
from pocketllm.golden.files.document import answer_document, case_document, parse_answer, parse_case
from pocketllm.golden.files.fields import render
from pocketllm.golden.fixture import Answer, Case, HardKey

PENDING = ".pending"
CHANGED = "the case was changed after this answer was recorded"
CASE_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")


HERE = Path("records") / "fixtures"
"""Of the working directory."""


def default_root() -> Path:
    """`records/fixtures` of the working directory, else that of the checkout this package runs from."""
    checkout = Path(__file__).resolve().parents[3] / HERE
    return checkout if not HERE.is_dir() and checkout.is_dir() else HERE


@dataclass(frozen=True)
class StaleFile:
    """A file of a fixture folder that nothing refers to."""

    path: Path
    outcome: Stale


@dataclass(frozen=True)
class FixtureFolder:
    """One checkpoint's fixtures. Reading raises RecordError naming file and key; `write_*` writes `*.pending`."""

    path: Path

    def names(self) -> list[str]:
        """Names of the accepted cases."""
        return sorted(file.stem for file in self.path.glob("*.json") if "." not in file.stem)

    def cases(self, names: Sequence[str] = ()) -> list[Case]:
        """Accepted cases, all or the named ones; RecordError for a name that is not there."""
        known = self.names()
        for name in names:
            if name not in known and name in self.pending_names():
                how = "`pocketllm golden accept` makes it count"
                raise RecordError(f"case {name!r} in {self.label()} is proposed and not accepted: {how}")
            if name not in known:
                listed = ", ".join(known) or "none"
                raise RecordError(f"no case {name!r} in {self.label()}; known: {listed}")
        return [self.case(name) for name in names or known]

    def check_known(self, names: Sequence[str]) -> None:
        """RecordError for a name that no case has, accepted or proposed."""
        known = sorted({*self.names(), *self.pending_names()})
        for name in names:
            if name not in known:
                raise RecordError(f"no case {name!r} in {self.label()}; known: {', '.join(known) or 'none'}")

    def case(self, name: str) -> Case:
        """One accepted case."""
        return self._case(self.path / f"{name}.json", name)

    def _case(self, file: Path, name: str) -> Case:
        case = parse_case(_read(file), self.label(file))
        if case.name != name:
            raise RecordError(f"{self.label(file)}: case: is {case.name!r}, the file's name says {name!r}")
        return case

    def answer(self, case: Case, key: HardKey) -> tuple[Answer | None, str]:
        """The answer recorded for this hard key, or None and why there is none to use."""
        file = self.path / f"{case.name}.{key.label}.json"
        if not file.is_file():
            return None, f"no answer for {key.label}: {self.label(file)} does not exist"
        answer = self._answer(file, case.name)
        differences = answer.hard_key.differences(key)
        if differences:
            return None, f"the answer for {key.label} has another hard key: {'; '.join(differences)}"
        if answer.request_sha256 != case.request_sha256:
            return None, CHANGED
        return answer, ""

    def answer_of_changed(self, case: Case, key: HardKey) -> Answer | None:
        """The answer of this hard key that another request than the case's now was recorded with."""
        if self.answer(case, key) != (None, CHANGED):
            return None
        return self._answer(self.path / f"{case.name}.{key.label}.json", case.name)

    def answer_on(self, name: str, key: HardKey) -> Answer | None:
        """The accepted answer for this kind of device and backend, whatever the rest of its hard key is."""
        file = self.path / f"{name}.{key.label}.json"
        return self._answer(file, name) if file.is_file() else None

    def _answer(self, file: Path, name: str) -> Answer:
        answer = parse_answer(_read(file), self.label(file))
        if answer.case != name:
            raise RecordError(f"{self.label(file)}: case: is {answer.case!r}, the file's name says {name!r}")
        return answer

    def answers(self, name: str) -> list[Answer]:
        """All accepted answers of a case, by the names of their files."""
        return [self._answer(file, name) for file in sorted(self.path.glob(f"{name}.*.json"))]

    def stale(self, names: Sequence[str] = ()) -> list[StaleFile]:
        """Answers that no case asks for any more: the case is gone, or was changed after them. All, or the named."""
        known, found = self.names(), []
        for file in sorted(self.path.glob("*.*.json")):
            name = file.name.partition(".")[0]
            if names and name not in names:
                continue
            if name not in known:
                found.append(StaleFile(file, Stale(f"there is no case {name!r} that it answers")))
            elif self._answer(file, name).request_sha256 != self.case(name).request_sha256:
                found.append(StaleFile(file, Stale(CHANGED)))
        return found

    def sha256(self, name: str) -> str:
        """Digest of a case file, of the proposed one where none is accepted, for the run record."""
        accepted = self.path / f"{name}.json"
        file = accepted if accepted.is_file() else self.path / f"{name}.json{PENDING}"
        return hashlib.sha256(file.read_bytes()).hexdigest()

    def write_case(self, case: Case) -> Path:
        """Propose a case; the file that `accept` looks for."""
        return self._write(f"{case.name}.json", render(case_document(case)))

    def write_answer(self, answer: Answer) -> Path:
        """Propose an answer."""
        return self._write(f"{answer.case}.{answer.hard_key.label}.json", render(answer_document(answer)))

    def _write(self, name: str, text: str) -> Path:
        file = self.path / (name + PENDING)
        partial = file.with_name(file.name + ".partial")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            partial.write_text(text, encoding="utf-8")
            partial.replace(file)  # what was proposed before stands until the new one is whole
        except OSError as error:
            with suppress(OSError):  # where its folder is none it is not there either
                partial.unlink(missing_ok=True)
            raise RecordError(
                f"cannot write {self.label(file)}: {error.strerror}; choose another --fixtures"
            ) from error
        return file

    def pending_names(self) -> list[str]:
        """Cases that have something proposed."""
        return sorted({file.name.split(".")[0] for file in self.path.glob(f"*.json{PENDING}")})

    def pending_case(self, name: str) -> Case | None:
        """The proposed case, None where only an answer is proposed."""
        file = self.path / f"{name}.json{PENDING}"
        return self._case(file, name) if file.is_file() else None

    def pending_answer(self, name: str, key: HardKey) -> Answer | None:
        """The answer proposed for this kind of device and backend."""
        file = self.path / f"{name}.{key.label}.json{PENDING}"
        return self._answer(file, name) if file.is_file() else None

    def label(self, file: Path | None = None) -> str:
        """How a message names a file or the folder: by its path below the working directory, else by two names.

        What is said goes into records, which tell no folders of a machine.
        """
        path = file or self.path
        is_below = not path.is_absolute() and ".." not in path.parts
        return path.as_posix() if is_below else "/".join(path.parts[-2:])


def check_name(name: str) -> str:
    """A case's name as a file's; RecordError for another."""
    if not CASE_NAME.fullmatch(name):
        raise RecordError(
            f"case name {name!r} must be lower-case letters, digits, - and _, beginning with one of the first two"
        )
    return name


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecordError(
            f"{file.name}: not UTF-8 at byte {error.start}; restore it, or record the case again"
        ) from error
    except OSError as error:
        raise RecordError(f"{file.name}: {error.strerror}") from error
