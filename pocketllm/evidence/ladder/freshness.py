"""How old a proof is, in changes of the code that it rests on: current, recent, stale, or unknown.

current     nothing under `pocketllm/` has changed since
recent      something has, but nothing that the claim rests on
stale       the claim rests on code that does something else now; the sentence names the first commit that made it so;
            or the answers that a golden run compared are not kept
unknown     the proof names no commit, was made from uncommitted changes, or its commit is not in this checkout
superseded  the catalog serves other weights under this name now (said by `model_pages.Source`)

What a claim rests on follows from its kind: an inspection on the reader of the file; parity on the family's file and
what that takes from its neighbors, on the backend's kernels and on the quant types of the file; golden and bench runs
on the lifecycle besides, and on what they were asked through. A file that was added, a comment, a docstring, another
quant type's file and another instruction set's header change none of it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from pocketllm.evidence.ladder.history import History
from pocketllm.evidence.ladder.meaning import imported, meaning
from pocketllm.evidence.ladder.rows import UNKNOWN, LadderRow, Proof
from pocketllm.evidence.ladder.suite import unanswered

CURRENT, RECENT, STALE, SUPERSEDED = "current", "recent", "stale", "superseded"
WORST_LAST = (CURRENT, RECENT, UNKNOWN, STALE)
ENGINE = "pocketllm/engine/"
MODELS = f"{ENGINE}models/"
READER = tuple(
    f"{ENGINE}weights/{name}.py"
    for name in ("gguf", "gguf_walk", "checkpoint", "tensor_file", "quant_types", "reading", "bits", "quant/__init__")
)
INSPECTION = f"{ENGINE}weights/inspection.py"
LIFECYCLE = (f"{ENGINE}lifecycle/", f"{ENGINE}load.py", f"{ENGINE}plan/")
INSTRUMENTS = (f"{ENGINE}lifecycle/null_model.py", f"{ENGINE}lifecycle/step_delay.py")
"""Parts of the lifecycle that no model's request goes through."""
THROUGH_HTTP = (f"{ENGINE}serving/", "pocketllm/cli/serve.py")
THROUGH_GENERATE = (f"{ENGINE}llm.py", "pocketllm/cli/generate.py")
LANES = {"avx512": "avx512", "avx": "avx2", "neon": "neon", "portable": "portable"}
"""How an instruction set's name begins, and the header of `simd/` that holds its vectors; the first that fits."""
DECLARATIONS = "contract"
"""The module of `engine/models/` that computes nothing."""
NOTHING: frozenset[str] = frozenset()

Names = Mapping[str, frozenset[str]]
"""Files of `engine/models/`, and the definitions in each that a family's file uses."""


# -- what a claim rests on; pure ---------------------------------------------------------------------------------------
def part_of(file: str, proof: Proof, family: str, shared: Names) -> str | None:
    """Which part of what a proof rests on a package file is; None when it rests on something else."""
    if proof.kind == "inspect":
        return "reader" if file in (*READER, INSPECTION) else None
    if file == family or file in shared:
        return "family"
    if is_kernel(file, proof.backend):
        return None if is_of_another_isa(file, proof.isa) else "kernels"
    if file in READER or is_quant_type(file, proof.quant_types):
        return "weights"
    if proof.kind == "parity":
        return None
    if file.startswith(LIFECYCLE) and file not in INSTRUMENTS:
        return "lifecycle"
    if file.startswith(f"{ENGINE}text/"):
        return "text"
    if proof.served:
        return "server" if file.startswith(THROUGH_HTTP) else None
    return "command" if proof.kind == "golden" and file.startswith(THROUGH_GENERATE) else None


def family_file(architecture: str) -> str:
    """The one file of a family."""
    return f"{MODELS}families/{architecture.replace('-', '_')}.py"


def is_kernel(file: str, backend: str | None) -> bool:
    """Whether a file is of this backend, or of any where a proof names none; the seam itself computes nothing."""
    if backend is None:
        return file.startswith(f"{ENGINE}backends/") and not file.startswith(f"{ENGINE}backends/api/")
    return file.startswith(f"{ENGINE}backends/{backend}/")


def is_quant_type(file: str, quant_types: Iterable[str]) -> bool:
    """Whether a file decodes one of these quant types."""
    return file in {f"{ENGINE}weights/quant/{name.lower()}.py" for name in quant_types}


def is_of_another_isa(file: str, isa: str | None) -> bool:
    """Whether a file holds vectors of an instruction set that the proof's kernels were not compiled for."""
    path = PurePosixPath(file)
    if isa is None or path.parent.name != "simd" or path.stem not in LANES.values():
        return False
    own = next((header for begin, header in LANES.items() if isa.startswith(begin)), path.stem)
    return path.stem != own


def shared_names(family: str, read: Callable[[str], bytes | None]) -> Names:
    """What a family's file uses of the modules beside it, and what those use of one another."""
    found: dict[str, frozenset[str]] = {}
    waiting = [family]
    while waiting:
        for module, names in imported(read(waiting.pop()) or b"", MODELS.replace("/", ".").strip(".")).items():
            other = f"{MODELS}{module.replace('.', '/')}.py"
            if module != DECLARATIONS and not names <= found.get(other, NOTHING):
                found[other] = found.get(other, NOTHING) | names
                waiting.append(other)
    return found


# -- judging -----------------------------------------------------------------------------------------------------------
def freshened(rows: Iterable[LadderRow], records: Path) -> list[LadderRow]:
    """Rows with the freshness of each proof and, as their own, the worst of these."""
    history = History(records)
    return [
        with_proofs(
            row, [answered(judged(proof, row.architecture, history), row.model, records) for proof in row.proofs]
        )
        for row in rows
    ]


def with_proofs(row: LadderRow, proofs: Sequence[Proof]) -> LadderRow:
    """A row with judged proofs; unknown without any."""
    worst = max(proofs, key=lambda proof: WORST_LAST.index(proof.freshness), default=None)
    if worst is None:
        return replace(row, freshness=UNKNOWN)
    return replace(row, proofs=tuple(proofs), freshness=worst.freshness, because=worst.because)


def answered(proof: Proof, model: str, records: Path) -> Proof:
    """A golden proof is stale without the answers that it compared: whoever repeats it here finds others, or none."""
    if proof.kind != "golden" or not proof.numerics or proof.freshness == STALE:
        return proof
    cases = unanswered(records, model, proof.backend, proof.numerics)
    if not cases:
        return proof
    because = f"no answer by {proof.numerics} is kept for case{'s' * (len(cases) > 1)} {', '.join(cases)}"
    return replace(proof, freshness=STALE, because=because)


def judged(proof: Proof, architecture: str, history: History) -> Proof:
    """A proof with its freshness and the sentence that says why."""
    commit = str(proof.code.get("commit") or "")
    if not commit or proof.code.get("dirty") is not False:
        why = "made from uncommitted changes" if commit else "names no commit"
        return replace(proof, freshness=UNKNOWN, because=why)
    changed = history.changed(commit)
    if changed is None:
        return replace(proof, freshness=UNKNOWN, because=f"commit {commit[:10]} is not in this checkout")
    family = family_file(architecture)
    shared = shared_names(family, history.now)
    parts = {
        file: part
        for file, how in changed.items()
        if how != "A" and (part := part_of(file, proof, family, shared)) is not None
    }
    before = history.at(commit, parts)
    differing = {
        file: part for file, part in parts.items() if differs(file, before[file], history.now(file), shared.get(file))
    }
    if differing:
        return replace(proof, freshness=STALE, because=first_cause(commit, differing, shared, history))
    because = f"{len(changed)} file{'s' * (len(changed) != 1)} that it does not rest on changed" if changed else ""
    return replace(proof, freshness=RECENT if changed else CURRENT, because=because)


def differs(file: str, before: bytes | None, after: bytes | None, names: frozenset[str] | None) -> bool:
    """Whether two versions of a file do something else; names: the definitions that matter, None for all."""
    if before is None or after is None:
        return before is not after
    return before != after and meaning(file, before, names) != meaning(file, after, names)


def first_cause(commit: str, differing: Mapping[str, str], shared: Names, history: History) -> str:
    """The parts that changed and the first commit that changed one of them, in a sentence."""
    *most, last = sorted(set(differing.values()))
    parts = f"{', '.join(most)} and {last}" if most else last
    before = history.at(commit, differing)
    commits = history.commits_since(commit, differing)
    for place, later in enumerate(commits):
        touched = sorted(later.files & differing.keys())
        after = history.at(later.sha, touched)
        if any(differs(file, before[file], after[file], shared.get(file)) for file in touched):
            more = len(commits) - place - 1
            return f"{parts} changed since: first in {later}" + (f", {more} more after it" if more else "")
    return f"{parts} changed since: uncommitted changes in {min(differing)}"


def machine_words(hard: Mapping[str, Any]) -> str:
    """The hard facts of a machine in a few words; empty where none could be read.

    >>> machine_words({"cpu": "AMD EPYC", "cores_usable": 2, "memory_gib": 24})
    'AMD EPYC, 2 cores, 24 GiB'
    """
    parts = [hard.get("cpu"), *(hard.get("gpus") or ())]
    parts += [f"{hard['cores_usable']} core{'s' * (hard['cores_usable'] != 1)}"] if "cores_usable" in hard else []
    parts += [f"{hard['memory_gib']} GiB"] if "memory_gib" in hard else []
    return ", ".join(str(part) for part in parts if part)
