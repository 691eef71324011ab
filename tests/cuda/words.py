"""The words of a driver's command line; where they ask for nothing that is there, a sentence of use instead."""

import re
import sys
from collections.abc import Collection
from typing import NoReturn


def asked(usage: str | None, known: Collection[str]) -> list[str]:
    """The words behind the module's name, each known by what stands before its `=` or `:`.

    usage: the module's docstring. The process ends with 2 when there is no word, or one that is not known.
    """
    words = sys.argv[1:]
    unknown = [word for word in words if re.split("[=:]", word)[0] not in known]
    if unknown or not words:
        why = f"nothing is called {', '.join(unknown)}" if unknown else "nothing is asked for"
        refuse(usage, f"{why}; there are: {', '.join(known)}")
    return words


def refuse(usage: str | None, why: str) -> NoReturn:
    """End the process with 2: why, and how the module is called."""
    print(f"{why}\n\n{(usage or '').strip()}", file=sys.stderr)
    sys.exit(2)
