"""Which rules judged a run: a digest of the code that makes verdicts out of samples."""

import hashlib
from functools import cache
from pathlib import Path

RULES_VERSION = 3
"""Version of the estimator, the verdict rules and the validity rules together; a history holds runs of one version."""

JUDGES = ("conditions", "contrasts", "rules", "slots", "stats", "validity", "verdict")
SOURCES = ("latency.py", *(f"analysis/{name}.py" for name in JUDGES))
"""Files below `bench/` that decide what a run's samples come to."""


@cache
def rules_sha256() -> str:
    """Digest of the source files that judge; it tells that two runs were judged alike, not what changed."""
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((Path(__file__).parents[1] / name).read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()
