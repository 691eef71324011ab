"""Who made a record, with which code, on what machine. An unreadable fact is absent, never guessed.

Host names, user names and paths of the machine never enter a record: paths shrink to file names, credentials and URL
queries are dropped, the host of a URL that is not loopback is hashed.
"""

import platform
import sys
from collections.abc import Sequence
from typing import Any

from pocketllm.evidence.provenance import gpu
from pocketllm.evidence.provenance.code import code_facts, package_versions
from pocketllm.evidence.provenance.machine import hard_facts, volatile_facts
from pocketllm.evidence.provenance.redaction import redact

TOOL = "pocketllm"


def collect(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run document keys `tool`, `argv`, `code` (with package versions) and `machine`; takes tens of milliseconds."""
    version = package_versions((TOOL,)).get(TOOL)
    return {
        "tool": {"name": TOOL} | ({"version": version} if version else {}),
        "argv": redact(sys.argv if argv is None else argv),
        "code": {**code_facts(), "python": platform.python_version(), "packages": package_versions()},
        "machine": {
            "hard": hard_facts() | gpu.hard_facts(),
            "volatile": volatile_facts() | gpu.volatile_facts(),
        },
    }
