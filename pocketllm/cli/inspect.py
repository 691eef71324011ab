"""`pocketllm inspect`: what a checkpoint is, what it would need, and whether it runs here."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pocketllm.cli.output import command, printable, say, write_json

if TYPE_CHECKING:
    from rich.table import Table

    from pocketllm.engine.weights.checkpoint import Checkpoint

MIN_VALUE_WIDTH = 26
"""Columns beside the names, which are folded where they would leave less."""
GIB, MIB = 1 << 30, 1 << 20


def register(app: typer.Typer) -> None:
    """Add this command to the app."""
    app.command(
        "inspect",
        epilog="Examples: pocketllm inspect smollm2-135m · pocketllm inspect model.gguf --tensors · "
        "pocketllm inspect model-00001-of-00003.gguf --json",
    )(command(inspect))


def inspect(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Catalog name, .gguf path (any shard of a split), or hf:owner/repo/file.",
            show_default=False,
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, tensors included.")] = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    record: Annotated[bool, typer.Option("--record", help="Keep the report as a run record.")] = False,
    record_dir: Annotated[
        Path | None,
        typer.Option("--record-dir", help="Where the record goes. [default: records/local]", show_default=False),
    ] = None,
) -> None:
    """Read a checkpoint's header: metadata, tensors, quant types, memory, and what is missing to run it.

    Works for every architecture and reads no weights.
    """
    from pocketllm.engine.weights.catalog import resolve_model
    from pocketllm.engine.weights.checkpoint import open_checkpoint
    from pocketllm.errors import OptionError

    if record_dir is not None and not record:
        raise OptionError("--record-dir needs --record")
    with open_checkpoint(resolve_model(model, say)) as checkpoint:
        report = report_on(checkpoint)
        if record:
            say(f"record: {keep_record(checkpoint, report, record_dir)}")
    if as_json:
        write_json(report)
    else:
        typer.echo(page(report, tensors), nl=False)


def report_on(checkpoint: "Checkpoint") -> dict[str, Any]:
    """The report, with what families and the tokenizer say of this checkpoint."""
    from pocketllm.engine.models.header import nextn_tensors
    from pocketllm.engine.models.registry import family_or_reason
    from pocketllm.engine.weights.inspection import inspect_checkpoint, readable

    family = family_or_reason(str(readable(checkpoint, "general.architecture") or "(none named)"))
    unread = frozenset() if isinstance(family, str) else nextn_tensors(checkpoint)
    return inspect_checkpoint(checkpoint, family, tokenizer_reasons(checkpoint), unread)


def tokenizer_reasons(checkpoint: "Checkpoint") -> list[str]:
    """Why the tokenizer of the header cannot be used; empty when it can."""
    import warnings

    from pocketllm.engine.text.vocabulary import read_vocabulary
    from pocketllm.errors import CheckpointError, UnsupportedFeatureError

    try:
        with warnings.catch_warnings():
            # a missing pre-tokenizer is told where text is really cut; a file without one can run
            warnings.simplefilter("ignore")
            read_vocabulary(checkpoint.metadata)
    except UnsupportedFeatureError as error:
        return list(error.reasons)
    except CheckpointError as error:
        return [str(error)]
    return []


def keep_record(checkpoint: "Checkpoint", report: dict[str, Any], directory: Path | None) -> Path:
    """Write a run record of kind inspect: a row a tensor, everything else in the document."""
    from pocketllm.evidence.store import RecordWriter, record_dir
    from pocketllm.golden.subject import model_document

    rows = [
        {"tensor": t["name"], "quant_type": t["quant_type"], "shape": t["shape"], "num_bytes": t["bytes"]}
        for t in report["tensors"]
    ]
    document = {"device_class": "cpu", "model": model_document(checkpoint)}
    with RecordWriter("inspect", document, record_dir(directory)) as writer:
        writer.append(rows)
        return writer.finish({"report": {key: value for key, value in report.items() if key != "tensors"}})


# -- the page ----------------------------------------------------------------------------------------------------------
def page(report: dict[str, Any], with_tensors: bool) -> str:
    """The report as text: fitted to the terminal, every line whole in a pipe."""
    import io

    from rich.console import Console

    from pocketllm.evidence.pages.layout import UNBOUNDED, columns

    width = columns() or UNBOUNDED
    console = Console(file=io.StringIO(), width=width, color_system=None, markup=False, highlight=False, emoji=False)
    for title, body in sections(report, with_tensors):
        body.columns[0].max_width = max(width - MIN_VALUE_WIDTH, MIN_VALUE_WIDTH)
        body.expand = body.expand and width < UNBOUNDED
        console.print(title)
        console.print(body)
        console.print()
    text: str = console.file.getvalue()  # type: ignore[attr-defined]  # the StringIO given above
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip() + "\n"


def sections(report: dict[str, Any], with_tensors: bool) -> list[tuple[str, "Table"]]:
    """Titles and tables, in reading order."""
    parts = [(heading(report), facts(overview(report))), ("Quant types", types_table(report))]
    parts.append(("Memory", facts(memory_facts(report["memory"]))))
    parts.append(("Metadata", facts([(key, value_text(value)) for key, value in report["metadata"].items()])))
    if with_tensors:
        parts.append(("Tensors", tensors_table(report)))
    verdict = [("yes", "nothing is missing")] if report["runs"] else []
    verdict += [("error", reason) for reason in report["errors"]] + [("no", reason) for reason in report["missing"]]
    parts.append(("Runs here?", facts([(word, printable(reason)) for word, reason in verdict])))
    return parts


def heading(report: dict[str, Any]) -> str:
    """Name of the checkpoint, and its title when it has one."""
    title = report["title"]
    return printable(f"{report['name']}: {title}" if isinstance(title, str) and title else report["name"])


def overview(report: dict[str, Any]) -> list[tuple[str, str]]:
    """The first facts anyone asks for."""
    tokenizer, files = report["tokenizer"], report["files"]
    kind = " · ".join(str(tokenizer[name]) for name in ("model", "pre") if tokenizer[name]) or "none"
    tokens = f", {tokenizer['num_tokens']:,} tokens" if tokenizer["num_tokens"] else ""
    template = "with" if tokenizer["has_chat_template"] else "without"
    bits = f" · {report['bits_per_weight']} bits each" if report["bits_per_weight"] else ""
    return [
        ("architecture", printable(str(report["architecture"]))),
        ("family", report["family"] or "none of this tool's"),
        ("parameters", f"{report['num_parameters']:,}{bits}"),
        ("file", f"{size_text(report['num_bytes'])} in {len(files)} file{'s' * (len(files) != 1)}"),
        ("format", file_format(report)),
        ("tensors", f"{report['num_tensors']:,} (--tensors lists them)"),
        *not_loaded(report["not_loaded"]),
        ("tokenizer", printable(f"{kind}{tokens}, {template} a chat template")),
    ]


def not_loaded(unread: dict[str, Any]) -> list[tuple[str, str]]:
    """Layers that predict further tokens, where there are some."""
    if not unread["tensors"]:
        return []
    blocks = ", ".join(f"blk.{number}" for number in unread["layers"])
    what = f"{blocks}: {unread['tensors']:,} tensors, {size_text(unread['bytes'])}"
    return [("not loaded", f"{what}, which predict further tokens (NextN)")]


def file_format(report: dict[str, Any]) -> str:
    """The format of its files."""
    if not report["gguf_version"]:
        return "a Hugging Face directory of safetensors, read as GGUF"
    return f"GGUF version {report['gguf_version']}, alignment {report['alignment']}"


def memory_facts(memory: dict[str, Any]) -> list[tuple[str, str]]:
    """Weights and cache."""
    rows = [
        ("weights, packed as in the file", size_text(memory["weights_bytes"])),
        ("weights, unpacked to float32", size_text(memory["weights_float32_bytes"])),
        ("context", f"{memory['context_length']:,} tokens" if memory["context_length"] else "not told"),
    ]
    if memory["kv_bytes_per_token"] is None:
        return [*rows, ("cache", "not to be told from this header")]
    for kind, per_token in memory["kv_bytes_per_token"].items():
        whole = f" · {size_text(memory['kv_bytes_context'][kind])} a context" if memory["kv_bytes_context"] else ""
        rows.append((f"cache in {kind}", f"{per_token:,} B a token{whole}"))
    for kind, per_token in (memory["window_bytes_per_token"] or {}).items():
        latest = f"{memory['window_tokens']:,} tokens"
        rows.append((f"beside it, of the latest {latest}", f"{per_token:,} B a token in {kind}"))
    if memory["state_bytes_per_request"]:
        rows.append(("recurrent states", f"{size_text(memory['state_bytes_per_request'])} a request, in float32"))
    return [*rows, ("cache sizes from", memory["source"])]


def types_table(report: dict[str, Any]) -> "Table":
    """The quant histogram."""
    table = grid()
    for name in ("type", "tensors", "bytes", "bits/weight", "decodable"):
        table.add_column(name, justify="left" if name in ("type", "decodable") else "right")
    for row in report["quant_types"]:
        bits = "?" if row["bits_per_weight"] is None else f"{row['bits_per_weight']:.3f}"
        decodable = "yes" if row["decodable"] else "no"
        table.add_row(row["type"], f"{row['tensors']:,}", f"{row['bytes']:,}", bits, decodable)
    return table


def tensors_table(report: dict[str, Any]) -> "Table":
    """Every tensor, in the file's order."""
    table = grid()
    table.add_column("name", overflow="fold")
    table.add_column("shape", justify="right")
    table.add_column("type")
    table.add_column("bytes", justify="right")
    for tensor in report["tensors"]:
        shape = " x ".join(str(size) for size in tensor["shape"]) or "scalar"
        table.add_row(printable(tensor["name"]), shape, tensor["quant_type"], f"{tensor['bytes']:,}")
    return table


def facts(rows: list[tuple[str, str]]) -> "Table":
    """Two columns: what, and how much."""
    table = grid(headed=False)
    table.expand = True
    table.add_column("what", overflow="fold")
    table.add_column("value", overflow="fold", ratio=1)  # what the names leave: a name in one piece can be searched for
    for name, value in rows:
        table.add_row(printable(name), value)
    return table


def grid(headed: bool = True) -> "Table":
    """A table without lines, indented by two."""
    from rich.table import Table

    return Table(box=None, show_header=headed, padding=(0, 0, 0, 2), header_style="", pad_edge=True)


def value_text(value: Any) -> str:
    """A metadata value on about a line."""
    if isinstance(value, dict):
        first = ", ".join(short(item) for item in value["first"])
        more = ", …" if value["count"] > len(value["first"]) else ""
        return f"{value['count']:,} x {value['array']}: [{first}{more}]"
    return short(value)


def short(value: Any, most: int = 60) -> str:
    """One value, on one line, cut when it is long."""
    if not isinstance(value, str):
        return str(value) if not isinstance(value, float) else f"{value:.7g}"
    text = printable(value[: most + 1])
    return text if len(value) <= most else f"{text[:most]}… ({len(value):,} characters)"


def size_text(num_bytes: int) -> str:
    """A size for people."""
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / MIB:.1f} MiB" if num_bytes >= MIB else f"{num_bytes:,} B"
