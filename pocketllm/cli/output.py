"""How every command speaks: data to stdout, progress to stderr, one map from an exception to an exit code.

Exit codes, for all commands: 0 done · 1 a check or a gate said no · 2 cannot be done as asked (bad input, unsupported,
unusable environment) · 3 could not judge · 4 unrecorded or under-powered under `--require` · 5 stale fixtures ·
70 a bug of ours · 130 interrupted.
"""

import errno
import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from io import TextIOWrapper
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TextIO, TypeVar

from pocketllm.errors import MachineError, PocketLLMError, UnsupportedFeatureError

P = ParamSpec("P")
R = TypeVar("R")

EXIT_REFUSED = 2
EXIT_BUG = 70
EXIT_INTERRUPTED = 130
LOADER = "pocketllm-load"
"""The thread that a server loads its model in."""


class Stoppable(Protocol):
    """What stands in a terminal and hides its cursor until it is stopped."""

    def stop(self) -> None:
        """Give the cursor back."""


STANDING_BARS: list[Stoppable] = []


def write_json(value: Any) -> None:
    """Print one JSON document on stdout, UTF-8, never NaN."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, allow_nan=False, indent=2) + "\n")
    sys.stdout.flush()


def say(message: str) -> None:
    """One line of progress or advice, on stderr; nothing where nobody reads it any more (`2>&1 | head`).

    Nor where its disk is full: hours of measuring are not given up for a line about them.
    """
    try:
        print(message, file=sys.stderr, flush=True)
    except OSError:
        lead_nowhere(sys.stderr)


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Around what a command prints before it ends with a verdict: a reader that leaves (`| head`) takes none of it."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        lead_nowhere(sys.stdout)
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):  # rich ends the process itself
            raise


def lead_nowhere(stream: TextIO) -> None:
    """Let what is still in a stream's buffer, and what comes, go to /dev/null."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def check_place(path: Path | None, flag: str) -> None:
    """MachineError where a file that a command is to write in the end has no folder to lie in."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        why = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise MachineError(f"cannot write {flag} {path}: {why}")


def write_file(path: Path, text: str, append: bool = False) -> None:
    """Write a file, or add to it; MachineError when it cannot be."""
    try:
        with path.open("a" if append else "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise MachineError(f"cannot write {path}: {error.strerror or error}") from error


def say_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """A warning as one line of advice, without the place in our code that raised it."""
    say(f"warning: {message}")


def fail(error: PocketLLMError) -> None:
    """Print a refusal: one sentence, or a headline and one line a reason.

    A refusal may quote a file or a name, so everything but its line ends is escaped that a terminal might obey.
    """
    lines = [f"error: {error}"]
    if isinstance(error, UnsupportedFeatureError) and len(error.reasons) > 1:
        lines = [f"error: {error.subject}:", *(f"  - {reason}" for reason in error.reasons)]
    for line in "\n".join(lines).split("\n"):
        say(printable(line))


def printable(text: str) -> str:
    """A text that came from a file or a stranger, with everything escaped that a terminal might obey."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def tell_bug() -> None:
    """The traceback of the exception at hand, and whose fault it is."""
    import traceback

    traceback.print_exc()
    say("this is a bug in pocketllm: please report it with the lines above")


def open_closed_streams() -> None:
    """Let a standard stream that the caller has closed (`>&-`, where Python has None) lead nowhere, like /dev/null."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - open while the process lives


def is_directory_gone() -> bool:
    """Whether the working directory has been removed under us: nothing can then be found or put by a relative path."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM like ctrl-C: what was paid for is kept, and servers that a command started are ended."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not the main thread, where no signal arrives
        yield
        return
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is interrupt:  # a server has handlers of its own until it has ended
            signal.signal(signal.SIGTERM, before)


def command(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a command so that an error made on purpose ends with its own exit code and one sentence."""
    import typer

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        open_closed_streams()
        if isinstance(sys.stdout, TextIOWrapper):
            # a terminal that cannot show a character gets its escape, not a traceback
            sys.stdout.reconfigure(errors="backslashreplace")
        warnings.showwarning = say_warning
        try:
            with terminated_as_interrupted():
                return function(*args, **kwargs)
        except PocketLLMError as error:
            fail(error)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            say("interrupted")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except BrokenPipeError:
            # the reader has gone (`| head`): no more output, and no complaint at interpreter exit
            lead_nowhere(sys.stdout)
            raise typer.Exit(0) from None
        except typer.Exit as end:
            leave_a_load(end.exit_code)
            raise
        except typer.Abort:
            raise
        except OSError as error:
            if is_directory_gone():
                say("error: the working directory is gone: change to one that is there")
                raise typer.Exit(EXIT_REFUSED) from None
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                tell_bug()
                raise typer.Exit(EXIT_BUG) from None
            say(f"error: {error.filename or 'the output'}: {error.strerror}; free some, or write elsewhere")
            lead_nowhere(sys.stdout)  # what is buffered has no other place
            raise typer.Exit(EXIT_REFUSED) from None
        except Exception as error:
            if reason := out_of_memory(error):
                say(f"error: {reason}")
                raise typer.Exit(EXIT_REFUSED) from None
            tell_bug()
            raise typer.Exit(EXIT_BUG) from None

    return run


def leave_a_load(code: int) -> None:
    """End the process at once where a thread of it still loads a model, as in a server that is told to end meanwhile.

    The interpreter's own end would unmap the file under the thread, which then dies of SIGSEGV, and all with it.
    """
    if not any(thread.name == LOADER for thread in threading.enumerate()):
        return
    import logging

    for bar in STANDING_BARS.copy():
        bar.stop()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # nobody reads it any more
            stream.flush()
    logging.shutdown()
    os._exit(code)


def out_of_memory(error: Exception) -> str | None:
    """What to do where memory ran out, a GPU's or the machine's; None for any other error."""
    ways = "take a smaller --kv-cache-bytes or --max-model-len, or end what else uses it"
    # torch's error by its name: torch itself is not imported for a message
    if any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return f"the GPU's memory is full: {ways} (nvidia-smi lists it)"
    return f"the machine's memory is full: {ways}" if isinstance(error, MemoryError) else None
