"""A model's suite of golden cases, as far as the ladder reads it: each of its parts once."""

import json
from pathlib import Path
from typing import Any

CASES: dict[str, dict[str, Any]] = {
    "capital": {"messages": [{"role": "user", "content": "Paris?"}], "paths": ["generate", "http_chat:stream@2"]},
    "long": {"prompt_token_ids": [1] * 257, "sampling": {"max_tokens": 64}},
    "emoji": {"prompt": "\N{SNOWMAN}"},
    "stop": {"prompt": "1, 2", "sampling": {"stop": ["3"]}},
    "sampled": {"prompt": "1, 2", "sampling": {"temperature": 0.8, "seed": 0}},
    "turn": {"messages": [{"role": role, "content": "hello"} for role in ("user", "assistant", "user")]},
}
"""Only the first names ways that records must go; the others are there to be counted."""


def write_suite(folder: Path) -> None:
    """The cases as files of a fixture folder."""
    folder.mkdir(parents=True)
    for name, case in CASES.items():
        (folder / f"{name}.json").write_text(json.dumps({"case": name, "paths": ["http_other"], **case}))
