"""What the ladder is computed from and what comes out: evidence, proofs, rows."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from pocketllm.evidence.device_class import recorded_device_class
from pocketllm.evidence.ladder.suite import Row

WORDS = ("unproven", "inspect only", "experimental", "text, CLI only", "text + server")
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Evidence:
    """One complete run: its document, its rows, and where it lies below the records folder."""

    run_id: str
    kind: str
    document: Mapping[str, Any]
    rows: Sequence[Row]
    path: str = ""

    @property
    def model(self) -> Mapping[str, Any]:
        model = self.document.get("model")
        return model if isinstance(model, Mapping) else {}

    @property
    def plan(self) -> Mapping[str, Any]:
        plan = self.document.get("plan")
        return plan if isinstance(plan, Mapping) else {}

    @property
    def device_class(self) -> str:
        return recorded_device_class(self.document)

    @property
    def quant_types(self) -> frozenset[str]:
        return frozenset(self.model.get("quant_types") or ())

    @property
    def is_served(self) -> bool:
        """Whether a bench run asked this engine over HTTP."""
        return self.document.get("served") is True

    @property
    def is_staged(self) -> bool:
        """Whether an arm of a bench run was slowed on purpose: such a run tells of the instrument, not of the model."""
        return any((arm.get("options") or {}).get("test_step_delay") for arm in self.document.get("arms") or [])


@dataclass(frozen=True)
class Proof:
    """One record that a rung stands on."""

    rung: int
    what: str
    run_id: str
    path: str
    kind: str
    code: Mapping[str, Any]
    """The record's `code` facts: commit, dirty, packages."""
    backend: str | None
    isa: str | None
    """Instruction set of its kernels, where the record names one."""
    quant_types: tuple[str, ...]
    machine: Mapping[str, Any]
    """Hard facts of the machine it was made on."""
    served: bool = False
    """Whether it was asked over HTTP."""
    numerics: str = ""
    """Version of the arithmetic that answered, where the record names one."""
    freshness: str = UNKNOWN
    because: str = ""
    """What made it less than current, in a sentence."""


def proof(item: Evidence, what: str, served: bool = False) -> Proof:
    """A record as a proof, its rung and freshness still to be said."""
    code, machine = item.document.get("code"), item.document.get("machine")
    hard = machine.get("hard") if isinstance(machine, Mapping) else None
    return Proof(
        rung=0,
        what=what,
        run_id=item.run_id,
        path=item.path,
        kind=item.kind,
        code=code if isinstance(code, Mapping) else {},
        backend=item.plan.get("backend"),
        isa=item.plan.get("isa"),
        quant_types=tuple(sorted(item.quant_types)),
        machine=hard if isinstance(hard, Mapping) else {},
        served=served,
        numerics=str(item.plan.get("numerics_version") or ""),
    )


@dataclass(frozen=True)
class LadderRow:
    """What one checkpoint is proved to do on one device class."""

    model: str
    architecture: str
    sha256: str
    device_class: str
    rung: int
    freshness: str
    proofs: tuple[Proof, ...]
    missing: str
    """What the next rung lacks, in a sentence; empty on the last."""
    because: str = ""
    """What made the row less than current, in a sentence."""

    @property
    def words(self) -> str:
        return WORDS[self.rung]

    @classmethod
    def unproven(cls, model: str, sha256: str) -> Self:
        """The row of a model that no record speaks of."""
        return cls(model, "", sha256, "any", 0, UNKNOWN, (), "an inspect record of this checkpoint")

    def renamed(self, model: str) -> Self:
        """The same row under another name of the model."""
        return replace(self, model=model)

    def as_dict(self) -> dict[str, Any]:
        """The row as JSON has it."""
        return {**asdict(self), "words": self.words}


@dataclass(frozen=True)
class Subject:
    """What a ladder row is about."""

    sha256: str
    device_class: str
    model: str
    architecture: str
    quant_types: frozenset[str]


SUBJECT_KINDS = frozenset({"inspect", "golden", "bench"})
"""Kinds of which a record makes a ladder row; calibrations and imported runs are no proof of anything here."""


def subjects(evidence: Sequence[Evidence]) -> list[Subject]:
    """Each checkpoint and device class that an inspect, golden or bench record names, as its latest record tells it.

    A parity record alone makes no subject: its checkpoint is a tiny stand-in for the family. An inspection runs on no
    device, so it makes one only of a checkpoint that nothing else speaks of.
    """
    ran = {str(item.model.get("sha256")) for item in evidence if item.kind in ("golden", "bench")}
    found: dict[tuple[str, str], Subject] = {}
    for item in evidence:
        sha256 = item.model.get("sha256")
        skipped = item.kind not in SUBJECT_KINDS or (item.kind == "inspect" and str(sha256) in ran)
        if skipped or not sha256:
            continue
        key = (str(sha256), item.device_class)
        before = found.get(key)
        found[key] = Subject(
            sha256=key[0],
            device_class=key[1],
            model=str(item.model.get("name") or (before.model if before else key[0][:12])),
            architecture=str(item.model.get("architecture") or (before.architecture if before else "")),
            quant_types=item.quant_types or (before.quant_types if before else frozenset()),
        )
    return sorted(found.values(), key=lambda subject: (subject.model, subject.device_class, subject.sha256))
