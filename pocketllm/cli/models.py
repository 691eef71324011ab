"""`pocketllm models`: what each model is proved to do, and the cache of fetched ones."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pocketllm.cli.output import command, say, write_json
from pocketllm.errors import MachineError, ModelNotFoundError, OptionError

if TYPE_CHECKING:
    from pocketllm.evidence.ladder import LadderRow
    from pocketllm.evidence.model_pages import Source

Records = Annotated[
    Path, typer.Option("--records", help="Folder of kept records.", show_default=True, metavar="FOLDER")
]
Docs = Annotated[Path, typer.Option("--docs", help="Folder of the model pages.", show_default=True, metavar="FOLDER")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="A model of the catalog.", show_default=False)]
RECORDS, DOCS = Path("records"), Path("docs/models")


def register(app: typer.Typer) -> None:
    """Add this command to the app."""
    group = typer.Typer(invoke_without_command=True)
    group.callback(epilog="Examples: pocketllm models · pocketllm models --json · pocketllm models pull smollm2-135m")(
        command(models)
    )
    group.command("show", epilog="Example: pocketllm models show smollm2-135m")(command(show))
    group.command("check", epilog="Example: pocketllm models check")(command(check))
    group.command("docs", epilog="Example: pocketllm models docs")(command(docs))
    group.command("pull", epilog="Example: pocketllm models pull smollm2-135m")(command(pull))
    group.command("ls", epilog="Example: pocketllm models ls")(command(ls))
    group.command("rm", epilog="Example: pocketllm models rm gemma3-270m --yes")(command(rm))
    app.add_typer(group, name="models")


# -- the ladder --------------------------------------------------------------------------------------------------------
def models(context: typer.Context, records: Records = RECORDS, as_json: AsJson = False) -> None:
    """What each model is proved to do here: the ladder computed from kept records; and the cache of fetched models."""
    if context.invoked_subcommand is not None:
        return
    rows = read_source(records).whole_ladder()
    if as_json:
        write_json([row.as_dict() for row in rows])
        return
    from pocketllm.evidence.pages.layout import table

    names = ("model", "architecture", "device", "rung", "freshness", "proofs")
    cells = [
        (row.model, row.architecture, row.device_class, f"{row.rung} {row.words}", row.freshness, len(row.proofs))
        for row in rows
    ]
    print_lines(table(names, cells, indent=""))
    for row in rows:
        if row.proofs:
            print_lines(["", f"{row.model} on {row.device_class}", *proof_lines(row)])


def show(name: Name, records: Records = RECORDS, as_json: AsJson = False) -> None:
    """Show one model: where it comes from, whether it is in the cache, its rung with proofs and what is missing."""
    from pocketllm.engine.weights.catalog import CATALOG, cached_path, is_cached
    from pocketllm.evidence.pages.layout import facts

    source = read_source(records)
    rows = [row for row in source.whole_ladder() if source.is_model(name, row.sha256, row.model)]
    entry = CATALOG.get(name)
    if not rows:
        known = ", ".join(dict.fromkeys(row.model for row in source.whole_ladder()))
        raise ModelNotFoundError(f"no model {name[:80]!r} in the catalog or in {records}; known: {known}")
    cached = cached_path(entry) if entry and is_cached(entry) else None
    if as_json:
        write_json({"name": name, "cached": cached and str(cached), "ladder": [row.as_dict() for row in rows]})
        return
    print_lines([name])
    if entry:
        about = (
            ("description", entry.description),
            ("license", entry.license),
            ("size", megabytes(entry.num_bytes)),
        )
        print_lines(facts(*about, ("cached", str(cached) if cached else f"no: pocketllm models pull {name}")))
    for row in rows:
        heading = f"{row.device_class}: rung {row.rung} of 4, {row.words}; freshness {row.freshness}"
        print_lines(["", heading, *proof_lines(row)])


def proof_lines(row: "LadderRow") -> list[str]:
    """The records that a row stands on, and what the next rung lacks."""
    from pocketllm.evidence.pages.layout import wrap

    lines = [f"  {proof.rung}  {proof.what:<36} {proof.run_id}" for proof in row.proofs]
    return lines + (wrap(f"next: {row.missing}") if row.missing else [])


def check(records: Records = RECORDS, docs: Docs = DOCS) -> None:
    """Exit 1 when a model page, or the README, claims more than the records prove."""
    from pocketllm.evidence.model_pages import overclaims

    source = read_source(records)
    pages = read_pages(docs)
    found = [claim for page, text in pages for claim in overclaims(page.name, text, source_for(page, source))]
    print_lines([str(claim) for claim in found])
    if found:
        raise typer.Exit(1)
    say(f"{len(pages)} pages claim no more than the records prove")


def docs(records: Records = RECORDS, docs: Docs = DOCS) -> None:
    """Write the generated tables of the model pages and the README anew, and print the pages that changed."""
    from pocketllm.evidence.model_pages import regenerate

    source = read_source(records)
    written = [(page, text, regenerate(page.name, text, source_for(page, source))) for page, text in read_pages(docs)]
    for page, before, after in written:
        if after != before:
            try:
                page.write_text(after, encoding="utf-8")
            except OSError as error:
                raise MachineError(f"cannot write {page}: {error.strerror}") from error
            typer.echo(page.as_posix())


def read_source(records: Path) -> "Source":
    """Ladder, evidence and the catalog's digests; says so when there is no such folder."""
    from pocketllm.engine.weights.catalog import CATALOG
    from pocketllm.evidence.ladder import dated, load
    from pocketllm.evidence.model_pages import Source

    if not records.is_dir():
        say(f"no folder {records}: without records nothing is proved")
    pinned = {entry.name: entry.sha256 for entry in CATALOG.values()}
    evidence = load(records)
    return Source(dated(evidence, records), evidence, pinned)


def source_for(page: Path, source: "Source") -> "Source":
    """The same source, with links that start where this page lies: docs/models/ or, for the README, the root."""
    return source if page.parent.name == "models" else replace(source, root="")


def read_pages(folder: Path) -> list[tuple[Path, str]]:
    """The model pages, the README two folders above them, and their text; OptionError when there are no pages."""
    pages = sorted(folder.glob("*.md"))
    readme = folder.resolve().parent.parent / "README.md"
    if pages and folder.name == "models" and readme.is_file():
        pages.append(readme)
    if not pages:
        raise OptionError(f"no pages in {folder}; run in a checkout, or name the folder with --docs")
    try:
        return [(page, page.read_text(encoding="utf-8")) for page in pages]
    except (OSError, UnicodeDecodeError) as error:
        raise MachineError(f"cannot read the pages in {folder}: {error}") from error


def print_lines(lines: Sequence[str]) -> None:
    """Lines on stdout that cannot steer a terminal."""
    from pocketllm.evidence.pages.layout import printable

    for line in lines:
        typer.echo(printable(line))


# -- the cache ---------------------------------------------------------------------------------------------------------
def pull(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A model of the catalog, or hf:owner/repo/file.")],
) -> None:
    """Fetch a model into the cache ($POCKETLLM_CACHE, or ~/.cache/pocketllm), unless it is there; print its path."""
    from pocketllm.engine.weights.catalog import pull as fetch

    typer.echo(str(fetch(name, say)))


def ls(as_json: AsJson = False) -> None:
    """List the models in the cache; the catalog's other ones are told on stderr."""
    from pocketllm.engine.weights.catalog import CATALOG, cache_dir, list_cached
    from pocketllm.evidence.pages.layout import table

    cached = list_cached()
    if as_json:
        write_json([{"name": model.name, "bytes": model.num_bytes, "path": str(model.path)} for model in cached])
        return
    cells = [(model.name, megabytes(model.num_bytes), model.path.name) for model in cached]
    print_lines(table(("model", "size", "file"), cells, indent=""))
    say(f"cache: {cache_dir()}")
    others = [name for name in CATALOG if name not in {model.name for model in cached}]
    if others:
        say(f"not fetched: {', '.join(others)}")


def rm(name: Name, yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False) -> None:
    """Remove a fetched model from the cache."""
    from pocketllm.engine.weights.catalog import list_cached, remove

    size = next((model.num_bytes for model in list_cached() if model.name == name), None)
    if size is not None and not yes:
        if not sys.stdin.isatty():
            raise OptionError(f"removing {name} wants a yes and nobody can be asked here; add --yes")
        if not typer.confirm(f"remove {name} ({megabytes(size)}) from the cache?", err=True):
            say(f"{name} stays in the cache")
            return
    say(f"{name}: {megabytes(remove(name))} freed")


def megabytes(num_bytes: int) -> str:
    """A download's size, in the unit that package indexes use."""
    return f"{num_bytes / 1e6:.1f} MB"
