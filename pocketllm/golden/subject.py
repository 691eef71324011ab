"""What is verified: one checkpoint under one plan, its digests, and the hard key that follows from both."""

import hashlib
import json
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pocketllm.errors import OptionError
from pocketllm.golden.fixture import URL_DEVICE, HardKey
from pocketllm.golden.prompts import Prompts

if TYPE_CHECKING:
    from pocketllm.engine.load import Engine
    from pocketllm.engine.options import EngineOptions
    from pocketllm.engine.plan import EnginePlan
    from pocketllm.engine.weights.checkpoint import Checkpoint

PEER_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
TOKENIZER_PREFIX = "tokenizer."
TEMPLATE_PREFIX = "tokenizer.chat_template"


@dataclass(frozen=True)
class Subject:
    """A checkpoint as it would run here. `engine` is given where one is loaded already."""

    name: str
    path: Path
    model: Mapping[str, Any]
    """name, sha256, architecture, quant_types, files, tokenizer_sha256, template_sha256: as run records carry it."""
    plan: "EnginePlan"
    options: "EngineOptions"
    engine: "Engine | None" = None
    prompts: Prompts = field(default_factory=lambda: Prompts({}))
    peer: str | None = None
    """The other engine that runs the checkpoint at a URL."""

    @property
    def hard_key(self) -> HardKey:
        if self.peer is not None:
            return self._peer_key(self.peer)
        return HardKey(
            device_kind=self.plan.device
            if self.plan.device == "cpu"
            else f"{self.plan.device}:{self.plan.device_name}",
            backend=self.plan.backend,
            numerics_version=self.plan.numerics_version,
            quant_types=tuple(sorted(self.model["quant_types"])),
            weights_sha256=self.model["sha256"],
            tokenizer_sha256=self.model["tokenizer_sha256"],
        )

    def _peer_key(self, peer: str) -> HardKey:
        """Of a peer we know its name, and the checkpoint that it was told to serve; its numerics are its own affair."""
        return HardKey(
            device_kind=URL_DEVICE,
            backend=peer,
            numerics_version="unknown",
            quant_types=tuple(sorted(self.model["quant_types"])),
            weights_sha256=self.model["sha256"],
            tokenizer_sha256=self.model["tokenizer_sha256"],
        )

    @property
    def soft(self) -> dict[str, Any]:
        """Facts that may change without changing an answer."""
        from pocketllm.evidence.provenance.code import package_versions

        return {
            "device": self.plan.device_name,
            "system": f"{platform.system()} {platform.machine()}",
            "threads": self.plan.options.get("threads"),
            "python": platform.python_version(),
            **package_versions(("torch", "numpy")),
        }

    def engine_flags(self) -> list[str]:
        """Engine options as command-line flags, for a process that must run the same."""
        from pocketllm.engine.options import as_flag

        flags = [f"--model={self.path}"]
        for item in fields(self.options):
            value = getattr(self.options, item.name)
            if item.name not in ("model", "sources", "test_step_delay") and value != item.default:
                flags.append(as_flag(item.name, value))
        return flags


def open_subject(
    options: "EngineOptions", peer: str | None = None, progress: Callable[[str], None] | None = None
) -> Subject:
    """Resolve, hash and plan a checkpoint without loading it; raises whatever says that it cannot run.

    peer: name of the other engine that runs it, in lower case. progress: told of a checkpoint that is fetched first.
    """
    from pocketllm.engine.load import plan_and_open
    from pocketllm.engine.weights.catalog import model_name, resolve_model
    from pocketllm.engine.weights.checkpoint import open_checkpoint

    if peer is not None and not PEER_NAME.fullmatch(peer):
        raise OptionError(f"--engine {peer!r} must be a name of lower-case letters, digits, dots and dashes")
    path = resolve_model(options.model, progress)
    checkpoint = open_checkpoint(path)
    try:
        name = model_name(path)
        plan, _ = plan_and_open(options, checkpoint, name)
        prompts = Prompts(checkpoint.metadata)
        return Subject(name, path, model_document(checkpoint), plan, options, prompts=prompts, peer=peer)
    finally:
        checkpoint.close()


def subject_of(engine: "Engine") -> Subject:
    """The subject that a loaded engine is."""
    from pocketllm.engine.weights.catalog import model_name

    checkpoint = engine.checkpoint
    return Subject(
        model_name(checkpoint.path),
        checkpoint.path,
        model_document(checkpoint),
        engine.plan,
        engine.options,
        engine,
        Prompts(checkpoint.metadata),
    )


def model_document(checkpoint: "Checkpoint") -> dict[str, Any]:
    """The `model` part of a run document: digests of content, names without folders."""
    from pocketllm.engine.weights.catalog import model_name
    from pocketllm.engine.weights.checkpoint import file_sha256

    files = [
        {"name": file.name, "bytes": file.stat().st_size, "sha256": file_sha256(file)} for file in checkpoint.files
    ]
    template = checkpoint.metadata.get(TEMPLATE_PREFIX)
    return {
        "name": model_name(checkpoint.path),
        "sha256": checkpoint.sha256(),
        "architecture": checkpoint.architecture,
        "quant_types": sorted(checkpoint.quant_histogram()),
        "files": files,
        "tokenizer_sha256": tokenizer_sha256(checkpoint.metadata),
        "template_sha256": text_sha256(template) if isinstance(template, str) else None,
    }


def tokenizer_sha256(metadata: Mapping[str, Any]) -> str:
    """Digest of all tokenizer metadata except the chat template, whatever order the file has it in."""
    digest = hashlib.sha256()
    for key in sorted(metadata):
        if key.startswith(TOKENIZER_PREFIX) and not key.startswith(TEMPLATE_PREFIX):
            digest.update(key.encode() + b"\0" + json.dumps(_plain(metadata[key])).encode() + b"\n")
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """A metadata value as JSON has it: arrays as lists, numpy scalars as numbers, bytes as text."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        return value
    return [_plain(item) for item in value]


def text_sha256(text: str) -> str:
    """Digest of a text as UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()
