"""`pocketllm golden review`: one screen a proposal, one key a decision; plain pages where nobody is watching."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pocketllm.cli import output
from pocketllm.cli.engine_options import (
    ActivationDtype,
    Backend,
    BatchInvariant,
    KVDtype,
    MaxModelLen,
    Model,
    Threads,
    engine_options,
)
from pocketllm.cli.golden.flags import Cases, Engine, Fixtures, folder_of, same_key
from pocketllm.cli.golden.keyboard import Keyboard
from pocketllm.cli.loading import say_fetches

if TYPE_CHECKING:
    from rich.console import Console

    from pocketllm.golden.files.folder import FixtureFolder
    from pocketllm.golden.reports.review import Proposed
    from pocketllm.golden.subject import Subject

KEYS = "[a]ccept  [r]eject  [s]kip  [A]ccept all  [R]eject all  [j/k] scroll  [q]uit"


def review(
    model: Model = None,
    cases: Cases = None,
    reason: Annotated[
        str, typer.Option("--reason", help="Why accepted answers are right.", show_default="asked for")
    ] = "",
    engine: Engine = None,
    fixtures: Fixtures = None,
    backend: Backend = None,
    threads: Threads = None,
    activation_dtype: ActivationDtype = None,
    kv_dtype: KVDtype = None,
    batch_invariant: BatchInvariant = None,
    max_model_len: MaxModelLen = None,
) -> None:
    """Go through what is proposed: accepted and proposed answer aligned at the first divergence, and what it cost.

    In a terminal each proposal is a screen: a accepts it, r deletes it, s leaves it, A and R do so with all that are
    left, j and k scroll, q ends. Elsewhere the same pages are printed, and nothing is decided.
    """
    from pocketllm.golden.reports.console import open_console
    from pocketllm.golden.reports.review import proposals
    from pocketllm.golden.subject import open_subject

    options = engine_options(
        model=model,
        backend=backend,
        threads=threads,
        activation_dtype=activation_dtype,
        kv_dtype=kv_dtype,
        batch_invariant=batch_invariant,
        max_model_len=max_model_len,
    )
    subject = open_subject(options, engine, say_fetches)
    folder = folder_of(subject, fixtures)
    folder.check_known(cases or ())
    found = [one for one in proposals(folder, subject.hard_key) if not cases or one.case.name in cases]
    if not found:
        output.say(f"nothing is proposed for {subject.hard_key.label} in {folder.label()}")
        return
    console = open_console(highlight=False)
    if console.is_terminal and sys.stdin.isatty():
        session = Session(subject, folder, found, reason, console)
        session.run()
        output.say(session.summary())
    else:
        print_pages(subject, found, console)
        flags = same_key(options, engine, fixtures)
        output.say(f'nothing is decided here: pocketllm golden accept --case NAME --reason "…"{flags}')


def print_pages(subject: "Subject", found: "list[Proposed]", console: "Console") -> None:
    """All proposals one below the other."""
    from rich.text import Text

    from pocketllm.golden.reports.review import page

    for number, one in enumerate(found, 1):
        console.print(Text(title(subject, one, number, len(found)), "bold reverse"))
        console.print(page(one, subject.prompts.token_text))
        console.print()


def title(subject: "Subject", one: "Proposed", number: int, total: int) -> str:
    """The headline of a proposal."""
    return f"{one.case.name} · {one.new.hard_key.label} · {subject.name} · {number} of {total}"


@dataclass
class Session:
    """A review in a terminal: what is left, and what was decided."""

    subject: "Subject"
    folder: "FixtureFolder"
    left: "list[Proposed]"
    reason: str
    console: "Console"
    accepted: list[str] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    message: str = ""
    offset: int = 0
    total: int = field(init=False)
    keyboard: Keyboard = field(default_factory=Keyboard)

    def __post_init__(self) -> None:
        self.total = len(self.left)

    def run(self) -> None:
        """Show, read a key, act, until nothing is left or q is pressed."""
        actions: dict[str, Callable[[], Any]] = {
            "a": lambda: self.accept(1),
            "r": lambda: self.reject(1),
            "s": self.skip,
            "A": lambda: self.accept(len(self.left)),
            "R": lambda: self.reject(len(self.left)),
            "j": lambda: self.scroll(1),
            "k": lambda: self.scroll(-1),
        }
        with self.console.screen(), self.keyboard:
            while self.left:
                self.draw()
                key = self.keyboard.key()
                self.message = ""
                if key in ("q", ""):
                    return
                if key in actions:
                    actions[key]()
                else:
                    self.message = f"{key!r} is no key here"

    def draw(self) -> None:
        """One proposal: a headline, as much of its page as fits, and the keys."""
        from rich.segment import Segment, Segments
        from rich.text import Text

        from pocketllm.golden.reports.review import page

        one, width, height = self.left[0], self.console.width, self.console.height
        options = self.console.options.update(width=width, height=None)
        lines = self.console.render_lines(page(one, self.subject.prompts.token_text), options, pad=False)
        room = max(1, height - 4)
        self.offset = max(0, min(self.offset, len(lines) - room))
        self.console.clear()
        number = self.total - len(self.left) + 1
        self.console.print(Text(title(self.subject, one, number, self.total).ljust(width)[:width], "bold reverse"))
        for line in lines[self.offset : self.offset + room]:
            self.console.print(Segments([*line, Segment.line()]), end="")
        more = len(lines) - room - self.offset
        below = f"{more} more lines: j" if more > 0 else ""
        self.console.print(Text(self.message or below, "yellow"), overflow="ellipsis", no_wrap=True)
        self.console.print(Text(KEYS, "bold"), overflow="ellipsis", no_wrap=True, end="")

    def accept(self, count: int) -> None:
        """Accept so many from here on; whatever forbids it is said, and they stay."""
        from pocketllm.errors import RecordError
        from pocketllm.golden.recording.accept import accept
        from pocketllm.golden.verify import is_ci

        self.reason = self.reason or self.ask_reason()
        names = [one.case.name for one in self.left[:count]]
        try:
            accept(self.subject, self.folder, names, self.reason, is_ci())
        except RecordError as error:
            self.message = str(error)
            return
        self.accepted += names
        self.go_on(count)

    def ask_reason(self) -> str:
        """The sentence that is kept in the fixture; empty accepts nothing."""
        self.console.print()
        with self.keyboard.lines():
            return self.console.input("reason: ").strip()

    def reject(self, count: int) -> None:
        """Delete so many proposals from here on."""
        from pocketllm.golden.recording.accept import reject

        names = [one.case.name for one in self.left[:count]]
        for name in names:
            reject(self.subject, self.folder, name)
        self.rejected += names
        self.go_on(count)

    def skip(self) -> None:
        """Leave one for another time."""
        self.skipped.append(self.left[0].case.name)
        self.go_on(1)

    def go_on(self, count: int) -> None:
        """To the next that is left, from its top."""
        self.left, self.offset = self.left[count:], 0

    def scroll(self, lines: int) -> None:
        """Move the page; `draw` keeps it on the screen."""
        self.offset = max(0, self.offset + lines)

    def summary(self) -> str:
        """What was decided, in one line."""
        parts = (("accepted", self.accepted), ("rejected", self.rejected), ("skipped", self.skipped))
        told = [f"{len(names)} {word} ({', '.join(names)})" for word, names in parts if names]
        rest = [f"{len(self.left)} left"] if self.left else []
        return "; ".join(told + rest) or "nothing was decided"
