"""What pages are written from: the ladder, the records behind it, and what the engine declares of itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pocketllm.evidence.ladder import Evidence, LadderRow
from pocketllm.evidence.ladder.freshness import SUPERSEDED

EVERY_MODEL = "*"


@dataclass(frozen=True)
class Source:
    """`pinned` is the sha256 of each model that the catalog knows by name; `root` leads from a page to the repository.

    `declared` is what each family says of itself: the fields of its ModelCapability, by architecture. `pages` are the
    models that have a page.
    """

    rows: Sequence[LadderRow]
    evidence: Sequence[Evidence]
    pinned: Mapping[str, str]
    declared: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    pages: frozenset[str] = frozenset()
    root: str = "../../"

    def address(self, path: str) -> str:
        """Where a page finds a record."""
        return f"{self.root}records/{path}"

    def name_of(self, sha256: str, name: str) -> str:
        """The catalog's name of these weights, else the one the records use."""
        return next((known for known, pin in self.pinned.items() if pin == sha256), name)

    def is_model(self, wanted: str, sha256: str, name: str) -> bool:
        """Whether weights are the model of that name: by digest where the catalog pins one."""
        return wanted == EVERY_MODEL or (sha256 == self.pinned[wanted] if wanted in self.pinned else name == wanted)

    def rows_of(self, model: str) -> list[LadderRow]:
        """The ladder rows of one model, or of every one."""
        return [row for row in self.whole_ladder() if self.is_model(model, row.sha256, row.model)]

    def evidence_of(self, model: str) -> list[Evidence]:
        """The records of one model's weights, oldest first."""
        return [
            item
            for item in sorted(self.evidence, key=lambda item: item.run_id)
            if self.is_model(model, str(item.model.get("sha256")), str(item.model.get("name")))
        ]

    def whole_ladder(self) -> list[LadderRow]:
        """All rows under the catalog's names, then catalog models that no record speaks of, as unproven.

        A row of other weights under a name that the catalog has given away is superseded. A file of no name here that
        was only timed, beside other engines, is no model of these pages.
        """
        found = [row.renamed(self.name_of(row.sha256, row.model)) for row in self.rows]
        found = [
            replace(row, freshness=SUPERSEDED, because=f"the catalog's {row.model} has other weights now")
            if self.pinned.get(row.model, row.sha256) != row.sha256
            else row
            for row in found
        ]
        found = [row for row in found if row.rung or row.model in self.pinned]
        seen = {row.sha256 for row in found}
        return found + [LadderRow.unproven(name, pin) for name, pin in self.pinned.items() if pin not in seen]
