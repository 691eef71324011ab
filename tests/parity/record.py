"""Compare with outside implementations and keep what came out as run records of kind `parity`.

    python -m tests.parity.record tiny                   # committed tiny checkpoints of every family, a record each
    python -m tests.parity.record tiny --backend cpu     # … over another backend than the reference
    python -m tests.parity.record tiny --only deepseek_v4    # … of one of them
    python -m tests.parity.record quants                 # a tiny checkpoint of every quant type, a record each
    python -m tests.parity.record smollm2-135m           # a model of the catalog against transformers
    python -m tests.parity.record smollm2-135m --llama-server http://127.0.0.1:8080    # … and beside llama.cpp

Start llama-server with `-ctk f32 -ctv f32 -fa off`, and say so with --llama-server-note: its default keys and values in
half precision cost as many likeliest tokens again as its rounded activations do.

Needs the oracle extra. Exits with 1 when a figure is outside its tolerance; the record says which. `--keep` also copies
a passing record to records/parity/, where it is reviewed and committed.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.engine.backends.api.backend import Backend
from pocketllm.engine.backends.api.capability import BackendOptions
from pocketllm.engine.backends.select import select_backend
from pocketllm.engine.models.registry import find_family
from pocketllm.engine.weights.catalog import resolve_model
from pocketllm.engine.weights.checkpoint import open_checkpoint
from tests.parity.compare import Difference, compare, ids_sha256, in_pieces, log_softmax
from tests.parity.drive import Driver, Step, chunks
from tests.parity.oracle_files import ORACLES, checkpoints, who_made
from tests.parity.random_blocks import STORED
from tests.parity.routes import TIE, decided

TEXT = Path(__file__).parent / "alice.txt"
POSITIONS = 512
TOLD = 1024
"""Log-probabilities that llama-server is asked for at each position: all 49152 would take it a second each."""
MADE = ("smollm3", "qwen35moe", "lfm2moe", "glm5_next", "gemma4_mixture", "folded_PTQ1_0", "folded_PQ2_0")
MODELS = ("smollm2-135m", "gemma3-270m")
NLL_TOLERANCE = 0.005
"""Relative."""


@dataclass(frozen=True)
class Limits:
    """What rounding may cost: NMSE of a tiny checkpoint's logits; on a real text mean KL, the share of equal likeliest
    tokens, and the oracle's lead in nats up to which another likeliest token is a tie.

    The share alone would judge the text: how many of its positions are ties. The lead alone would let everything flip.
    """

    nmse: float
    kl: float
    top1: float
    tie: float


LIMITS = {
    "float32": Limits(1e-9, 1e-5, 0.995, 0.01),
    "float16": Limits(1e-4, 1e-3, 0.98, 0.05),
    "int16": Limits(3e-3, 1e-3, 0.98, 0.05),
    "int8": Limits(3e-3, 2e-3, 0.95, 0.1),
}
"""By the narrowest of what rows and cached values are rounded to."""


@dataclass(frozen=True)
class Recorder:
    """A backend that is compared, and where its records go."""

    backend: Backend
    directory: Path | None
    keep: bool

    @property
    def limits(self) -> Limits:
        used = {self.backend.capability.activation_dtype, self.backend.capability.kv_dtype}
        if used & {"int8", "mixed"}:
            return LIMITS["int8"]
        return LIMITS["int16" if "int16" in used else "float32" if used == {"float32"} else "float16"]

    def runs(self, path: Path) -> bool:
        """Whether the backend has the operations of a checkpoint's family; says so where it has not."""
        with open_checkpoint(path) as checkpoint:
            lacking = (
                find_family(checkpoint.architecture).capability.ops_of(checkpoint.metadata)
                - self.backend.capability.ops
            )
        if lacking:
            print(f"none {path.name}: backend {self.backend.capability.name} has no {', '.join(sorted(lacking))}")
        return not lacking


WAYS: Mapping[str, int] = {"one batch": 1 << 30, "chunks of 7": 7, "token by token": 1}


# -- what is compared ------------------------------------------------------------------------------------------------
def tiny_rows(to: Recorder, name: str) -> Iterator[dict[str, Any]]:
    """One tiny checkpoint against its committed logits, in four ways of feeding it."""
    expected = np.load(ORACLES / f"{name}.npz")
    path = ORACLES / f"{name}.gguf"
    yield from rows_in_all_ways(to, path, expected["input_ids"], expected["logits"], who_made(expected))


def write_quant_type(path: Path, quant_type: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.floating], str]:
    """A tiny checkpoint of one quant type, written to path: ids, what transformers makes of them on weights that others
    decode, and its release."""
    from tests.parity.random_blocks import write_packed, write_twin
    from tests.parity.transformers_oracle import load_llama, logits

    ids = np.random.RandomState(9).randint(0, 512, 48).astype(np.int64)
    oracle = logits(load_llama(write_twin(path.with_suffix(".twin"), quant_type, seed=9)), ids)
    write_packed(path, quant_type, seed=9)
    return ids, oracle, version("transformers")


def rows_in_all_ways(
    to: Recorder, path: Path, ids: npt.NDArray[np.integer], oracle: npt.NDArray[np.floating], made_by: tuple[str, str]
) -> Iterator[dict[str, Any]]:
    """A row for each way of feeding the same tokens; where 8 bits may choose another expert is left out.

    made_by: whose code gave the oracle's logits, and its release.
    """
    driver = Driver(path, ops=to.backend.ops)
    family, nmse = driver.checkpoint.architecture, to.limits.nmse
    kept = decided(path, ids.tolist()) if to.limits is LIMITS["int8"] else np.ones(len(ids), bool)
    left_out = len(ids) - int(kept.sum())
    for way, size in WAYS.items():
        driver.reset()
        [got] = driver.run([ids.tolist()], chunks(len(ids), size))
        yield tiny_row(family, ids, way, made_by, compare([(got[kept], oracle[kept])]), nmse, left_out)
    driver.reset()
    lengths = [len(ids), 23, 11, 4, 1]
    steps: list[Step] = [[(s, -(-n // 2)) for s, n in enumerate(lengths)]]
    steps.append([(s, n // 2) for s, n in enumerate(lengths) if n > 1])
    got_all = driver.run([ids[:n].tolist() for n in lengths], steps)
    pairs = [(got[kept[:n]], oracle[:n][kept[:n]]) for got, n in zip(got_all, lengths, strict=True) if kept[:n].any()]
    yield tiny_row(family, ids, "ragged batch of 5 sequences", made_by, compare(pairs), nmse, left_out)


def tiny_row(
    family: str,
    ids: npt.NDArray[np.integer],
    way: str,
    made_by: tuple[str, str],
    difference: Difference,
    nmse: float,
    left_out: int,
) -> dict[str, Any]:
    """A row that is held to NMSE. left_out: how many positions were not compared."""
    undecided = f"; {left_out} of {len(ids)} positions, where a router's lead is at most {TIE}, are left out"
    return {
        "subject": f"family:{family}, {way}",
        "oracle": made_by[0],
        "oracle_version": made_by[1],
        "inputs_sha256": ids_sha256(ids),
        **difference.figures(),
        "tolerance": nmse,
        "passed": difference.nmse <= nmse,
        "detail": f"{way}; tolerance is of nmse{undecided if left_out else ''}",
    }


def against_transformers(
    limits: Limits, name: str, path: Path, ids: npt.NDArray[np.int64], ours: npt.NDArray[np.float32]
) -> dict[str, Any]:
    """Teacher-forced positions against transformers in float32 on the weights that gguf-py decodes."""
    from tests.parity.transformers_families import load_model
    from tests.parity.transformers_oracle import logits

    theirs = logits(load_model(path), ids)
    difference = compare(in_pieces(ours, theirs))
    own_nll, their_nll = nll(ours, ids), nll(theirs, ids)
    detail = f"weights decoded by gguf-py; mean NLL of the text {own_nll:.6f}, the oracle's {their_nll:.6f}"
    row = real_row(
        name, "transformers", version("transformers"), ids, difference, limits.kl, limits.top1, detail, limits.tie
    )
    return {**row, "passed": row["passed"] and abs(own_nll / their_nll - 1) <= NLL_TOLERANCE}


def against_llama_cpp(
    name: str, url: str, note: str, ids: npt.NDArray[np.int64], ours: npt.NDArray[np.float32]
) -> dict[str, Any]:
    """The same positions beside a running llama-server, which multiplies with activations rounded to 8 bits."""
    import httpx

    with httpx.Client(base_url=url, timeout=120) as client:
        build = client.get("/props").json().get("build_info", "unknown")
        difference = Difference()
        for position, row in enumerate(ours):
            token_ids, logprobs = next_token(client, ids[: position + 1].tolist())
            same = int(row.argmax() == token_ids[0])
            difference.add(with_rest(log_softmax(row)[token_ids]), with_rest(logprobs), same, TOLD)
            if position % 64 == 63:
                print(f"llama.cpp: {position + 1} of {len(ours)} positions", file=sys.stderr, flush=True)
    detail = f"its activations are 8-bit; its {TOLD} likeliest tokens, and the rest as one; {note or 'as started'}"
    return real_row(name, "llama.cpp", str(build), ids, difference, 5e-3, 0.97, detail)


def next_token(client: Any, prompt: list[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """llama-server's TOLD likeliest tokens after a prompt of ids, with log-probabilities from before any sampler."""
    body = {
        "prompt": prompt,
        "n_predict": 1,
        "n_probs": TOLD,
        "cache_prompt": True,
        "temperature": 1.0,
        "samplers": [],
        "post_sampling_probs": False,
    }
    reply = client.post("/completion", json=body)
    reply.raise_for_status()
    entries = reply.json()["completion_probabilities"][0]["top_logprobs"]
    token_ids = np.array([entry["id"] for entry in entries], np.int64)
    logprobs = np.array([entry["logprob"] for entry in entries], np.float64)
    assert len(set(token_ids.tolist())) == TOLD, f"llama-server told {len(entries)} of {TOLD} log-probabilities"
    assert np.all(np.diff(logprobs) <= 0), "llama-server's log-probabilities are not in order"
    return token_ids, logprobs


def with_rest(logprobs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """[1, n + 1]: some of a distribution's log-probabilities, and that of everything else as one outcome."""
    rest = max(1.0 - float(np.exp(logprobs).sum()), 1e-12)
    return np.append(logprobs, np.log(rest))[None]


def real_row(
    name: str,
    oracle: str,
    release: str,
    ids: npt.NDArray[np.int64],
    difference: Difference,
    kl: float,
    top1: float,
    detail: str,
    tie: float | None = None,
) -> dict[str, Any]:
    """A row that is held to mean KL, the share of equal likeliest tokens and, where all logits are there, to ties."""
    flips = (
        f"another likeliest token only where the oracle's leads by at most {tie} (seen: {difference.widest_flip:.3f}); "
    )
    return {
        "subject": f"model:{name}",
        "oracle": oracle,
        "oracle_version": release,
        "inputs_sha256": ids_sha256(ids),
        **difference.figures(),
        "tolerance": kl,
        "passed": difference.kl <= kl and difference.top1 >= top1 and (tie is None or difference.widest_flip <= tie),
        "detail": f"{len(ids)} teacher-forced positions; tolerance is of kl, top1 at least {top1}; "
        f"{flips if tie is not None else ''}{detail}",
    }


# -- what is kept ------------------------------------------------------------------------------------------------------
def write_record(to: Recorder, path: Path, rows: Iterator[dict[str, Any]]) -> bool:
    """Append each row as it comes, finish, and say what came out; True when all rows are inside tolerance."""
    from pocketllm.evidence import store
    from pocketllm.evidence.device_class import device_class
    from pocketllm.golden.subject import model_document

    with open_checkpoint(path) as checkpoint:
        model = model_document(checkpoint)
    capability = to.backend.capability
    plan = {"backend": capability.name, "device": capability.device, "numerics_version": capability.numerics_version}
    document = {"device_class": device_class(plan), "model": model, "plan": plan}
    passed = True
    with store.RecordWriter("parity", document, store.record_dir(to.directory)) as writer:
        for row in rows:
            writer.append(row)
            passed &= bool(row["passed"])
            word = "ok  " if row["passed"] else "FAIL"
            print(
                f"{word} {path.name}: {row['subject']} against {row['oracle']} {row['oracle_version']}: n={row['n']} "
                f"nmse={row['nmse']:.2e} max={row['max_error']:.2e} top1={row['top1']:.4f} kl={row['kl']:.2e}"
            )
        record = writer.finish()
    if to.keep and passed:
        record = store.keep(record)
    print(f"record: {record}", file=sys.stderr)
    return passed


def recorder_of(arguments: argparse.Namespace, path: Path) -> Recorder:
    """The backend as the engine opens it for a checkpoint: with the activations that its family needs, unless said."""
    with open_checkpoint(path) as checkpoint:
        needed = find_family(checkpoint.architecture).capability.least_activations
    options = BackendOptions(None, arguments.activation_dtype, arguments.kv_dtype, needed)
    return Recorder(select_backend(arguments.backend, options), arguments.record_dir, arguments.keep)


def record_spec(recorder: Callable[[Path], Recorder], name: str) -> bool:
    """A record of a tiny checkpoint that is not committed but made again from its seed."""
    from tests.parity import gemma4_oracle, glm5_next_oracle, recurrent_oracle, transformers_families
    from tests.parity.folded import write_folded
    from tests.parity.tiny_families import write_family

    specs = {**transformers_families.SPECS, **recurrent_oracle.SPECS, **gemma4_oracle.SPECS, **glm5_next_oracle.SPECS}
    expected = np.load(ORACLES / f"{name}.npz")
    with TemporaryDirectory() as work:
        path = Path(work) / f"{name}.gguf"
        if name in specs:
            write_family(path, specs[name])
        else:
            write_folded(path, name.removeprefix("folded_"))
        to = recorder(path)
        rows = rows_in_all_ways(to, path, expected["input_ids"], expected["logits"], who_made(expected))
        return write_record(to, path, rows)


def record_quant_type(recorder: Callable[[Path], Recorder], quant_type: str) -> bool:
    """Make a checkpoint of this type, and a record of it."""
    with TemporaryDirectory() as work:
        path = Path(work) / f"random_{quant_type}.gguf"
        ids, oracle, release = write_quant_type(path, quant_type)
        to = recorder(path)
        rows = rows_in_all_ways(to, path, ids, oracle, ("transformers", release))
        return write_record(to, path, rows)


def nll(logits: npt.NDArray[np.float32], ids: npt.NDArray[np.int64]) -> float:
    """Mean negative log-likelihood in nats of each token after the first."""
    total = 0.0
    for at in range(0, len(ids) - 1, 32):
        following = ids[at + 1 : at + 33, None]
        total -= np.take_along_axis(log_softmax(logits[at : at + len(following)]), following, axis=-1).sum()
    return total / (len(ids) - 1)


def model_rows(to: Recorder, name: str, path: Path, server: str | None, note: str) -> Iterator[dict[str, Any]]:
    """A real model on real text: one forward of ours, compared with each oracle."""
    from pocketllm.engine.text.tokenizer import Tokenizer

    driver = Driver(path, ops=to.backend.ops)
    tokenizer = Tokenizer.from_metadata(driver.checkpoint.metadata)
    ids = np.array(tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:POSITIONS], np.int64)
    assert len(ids) == POSITIONS, len(ids)
    [ours] = driver.run([ids.tolist()], chunks(len(ids), 256))
    yield against_transformers(to.limits, name, path, ids, ours)
    if server:
        yield against_llama_cpp(name, server, note, ids, ours)


def main() -> int:
    """Parse, compare, record."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity.record", description=__doc__.split("\n\n")[0])
    parser.add_argument("subject", choices=["tiny", "quants", *MODELS])
    parser.add_argument("--only", choices=[*checkpoints(), *MADE], help="with tiny: this checkpoint alone")
    parser.add_argument("--llama-server", metavar="URL", help="a running llama-server with the same file loaded")
    parser.add_argument("--llama-server-note", default="", metavar="TEXT", help="how that server was started")
    parser.add_argument("--backend", default="reference", help="what is compared (default: reference)")
    parser.add_argument("--activation-dtype", help="as the engine's option of that name")
    parser.add_argument("--kv-dtype", help="as the engine's option of that name")
    parser.add_argument("--record-dir", type=Path)
    parser.add_argument("--keep", action="store_true", help="copy passing records to records/parity/")
    arguments = parser.parse_args()
    recorder = cache(partial(recorder_of, arguments))
    match arguments.subject:
        case "tiny":
            wanted = [arguments.only] if arguments.only else [*checkpoints(), *MADE]
            paths = {name: ORACLES / f"{name}.gguf" for name in checkpoints() if name in wanted}
            results = [
                write_record(recorder(path), path, tiny_rows(recorder(path), name))
                for name, path in paths.items()
                if recorder(path).runs(path)
            ]
            results += [record_spec(recorder, name) for name in MADE if name in wanted]
        case "quants":
            known = select_backend(arguments.backend).capability.quant_types
            results = [record_quant_type(recorder, quant_type) for quant_type in sorted(STORED & known)]
        case name:
            path = resolve_model(name, lambda line: print(line, file=sys.stderr))
            rows = model_rows(recorder(path), name, path, arguments.llama_server, arguments.llama_server_note)
            results = [write_record(recorder(path), path, rows)]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
