"""70 published chat templates × 3 conversations, rendered as transformers rendered them.

The templates are others' and have licences of their own, so they are not here: POCKETLLM_CHAT_TEMPLATES names the
folder `vendor/llama.cpp/models/templates` of an unpacked source distribution of llama-cpp-python 0.3.36. What is here,
in `oracles/text/published_templates.json`, are digests of each template and of what transformers 5.24 made of it; null
where transformers refuses the conversation, for a reason of the template's own.
"""

import copy
import json
import os
from collections.abc import Mapping
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from pocketllm.engine.text.chat_template import ChatTemplate
from pocketllm.engine.text.protection import unprotect
from pocketllm.errors import RequestError

ORACLE = json.loads((Path(__file__).parents[1] / "oracles" / "text" / "published_templates.json").read_text())
FOLDER = os.environ.get("POCKETLLM_CHAT_TEMPLATES", "")
CONVERSATIONS: Mapping[str, Any] = ORACLE["conversations"]


def source_of(name: str) -> str:
    path = Path(FOLDER, name)
    if not FOLDER or not path.is_file():
        pytest.skip(f"chat-templates-missing: {name}")
    source = path.read_text(encoding="utf-8")
    if sha256(source.encode()).hexdigest() != ORACLE["rendered"][name]["sha256"]:
        pytest.fail(f"{path} is another version of the template than transformers rendered")
    return source


def test_the_oracle_holds_70_templates_and_most_take_every_conversation() -> None:
    answers = [row[name] for row in ORACLE["rendered"].values() for name in CONVERSATIONS]

    assert len(ORACLE["rendered"]) == 70
    assert set(CONVERSATIONS) == {"plain", "tools", "reasoning"}
    assert sum(answer is None for answer in answers) == 15


@pytest.mark.full  # the folder is not on most machines
@pytest.mark.parametrize("name", ORACLE["rendered"])
def test_a_published_template_renders_as_transformers_renders_it(name: str) -> None:
    template = ChatTemplate(source_of(name), ORACLE["special"], {}, now=lambda: datetime.fromisoformat(ORACLE["now"]))
    for conversation, given in CONVERSATIONS.items():
        messages = copy.deepcopy(given["messages"])
        expected = ORACLE["rendered"][name][conversation]
        if expected is None:
            with pytest.raises(RequestError):
                template.render(messages, **given["arguments"])
        else:
            text = unprotect(template.render(messages, **given["arguments"]))
            assert sha256(text.encode()).hexdigest()[:16] == expected, (conversation, text)
