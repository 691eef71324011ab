"""`pocketllm models`: what each model is proved to do, and the cache of fetched ones."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pocketllm.cli.output import command, reader_may_leave, say, write_json
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
Page = tuple[Path, str]
"""Where a page lies, and its text."""
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
            print_lines(["", f"{row.model} on {row.device_class}", *proof_lines(row), *because_lines(row)])


def show(name: Name, records: Records = RECORDS, as_json: AsJson = False) -> None:
    """Show one model: what it is and does, whether it is in the cache, each rung's proofs, and what the next lacks."""
    from pocketllm.engine.weights.catalog import CATALOG, cached_path, is_cached
    from pocketllm.evidence.pages.layout import facts, section

    source = read_source(records)
    rows = source.rows_of(name)
    if not rows:
        known = ", ".join(dict.fromkeys(row.model for row in source.whole_ladder()))
        raise ModelNotFoundError(f"no model {name[:80]!r} in the catalog or in {records}; known: {known}")
    entry = CATALOG.get(name)
    cached = cached_path(entry) if entry and is_cached(entry) else None
    features = dict(feature_facts(name, source))
    if as_json:
        ladder = [row.as_dict() for row in rows]
        write_json({"name": name, "cached": cached and str(cached), "features": features, "ladder": ladder})
        return
    print_lines([name])
    if entry:
        about = (
            ("description", entry.description),
            ("license", entry.license),
            ("size", megabytes(entry.num_bytes)),
        )
        print_lines(facts(*about, ("cached", str(cached) if cached else f"no: pocketllm models pull {name}")))
    print_lines(section("What it does", facts(*features.items())))
    for row in rows:
        print_lines(["", f"{row.device_class}: rung {row.rung} of 4, {row.words}; freshness {row.freshness}"])
        print_lines([*proof_lines(row), *because_lines(row), *elsewhere_lines(row)])


def proof_lines(row: "LadderRow") -> list[str]:
    """The records that a row stands on, each with its freshness, and what the next rung lacks."""
    from pocketllm.evidence.pages.layout import wrap

    lines = [f"  {proof.rung}  {proof.what:<34} {proof.run_id}  {proof.freshness}" for proof in row.proofs]
    return lines + (wrap(f"next: {row.missing}") if row.missing else [])


def because_lines(row: "LadderRow") -> list[str]:
    """What made proofs less than current, each sentence once, with the rungs that it is about."""
    from pocketllm.evidence.pages.layout import wrap

    rungs: dict[str, dict[int, None]] = {}
    for proof in row.proofs:
        if proof.because and proof.freshness != "recent":
            rungs.setdefault(proof.because, {})[proof.rung] = None
    if not rungs and row.because:
        return wrap(row.because)
    return [line for why, found in rungs.items() for line in wrap(f"rung {', '.join(map(str, found))}: {why}")]


def elsewhere_lines(row: "LadderRow") -> list[str]:
    """Machines of the proofs that are not this one: the tokens hold on one of the same class, the speeds do not."""
    from pocketllm.evidence.ladder.freshness import machine_words
    from pocketllm.evidence.pages.layout import wrap
    from pocketllm.evidence.provenance import gpu
    from pocketllm.evidence.provenance.machine import hard_facts

    here = machine_words({**hard_facts(), **gpu.hard_facts()})
    others = dict.fromkeys(machine_words(proof.machine) for proof in row.proofs if proof.kind != "inspect")
    return [
        line for machine in others if machine not in ("", here) for line in wrap(f"proved on {machine}; here {here}")
    ]


def feature_facts(name: str, source: "Source") -> Iterator[tuple[str, str]]:
    """What the family declares and the file holds, without the markup of a page."""
    from pocketllm.evidence.model_pages.tables import feature_rows

    for what, told, _ in feature_rows(name, source):
        yield what.replace("`", ""), told.replace("`", "")


def check(records: Records = RECORDS, docs: Docs = DOCS) -> None:
    """Exit 1 when a model page, or the README, claims more than the records prove, or a table there is not theirs."""
    from pocketllm.evidence.model_pages.claims import discrepancies, overclaims

    source = read_source(records, with_freshness=False)
    pages = read_pages(docs)
    found: list[str] = []
    for page, text in pages:
        seen = source_for(page, source, pages)
        found += map(str, (*overclaims(page.name, text, seen), *discrepancies(page.name, text, seen)))
    with reader_may_leave():
        print_lines(found)
    if found:
        raise typer.Exit(1)
    say(f"{len(pages)} pages claim no more than the records prove")


def docs(records: Records = RECORDS, docs: Docs = DOCS) -> None:
    """Write the generated tables of the model pages and the README anew, and print the pages that changed."""
    from pocketllm.evidence.model_pages import regenerate

    source = read_source(records, with_freshness=False)
    pages = read_pages(docs)
    written = [(page, text, regenerate(page.name, text, source_for(page, source, pages))) for page, text in pages]
    for page, before, after in written:
        if after != before:
            try:
                page.write_text(after, encoding="utf-8")
            except OSError as error:
                raise MachineError(f"cannot write {page}: {error.strerror}") from error
            typer.echo(page.as_posix())


def read_source(records: Path, with_freshness: bool = True) -> "Source":
    """Ladder, evidence, the catalog's digests and the families' declarations; says so when there is no such folder,
    and raises OptionError for one that was named.

    Freshness asks git for much, and no page speaks of it.
    """
    from pocketllm.engine.models.registry import find_family, known_architectures
    from pocketllm.engine.weights.catalog import CATALOG
    from pocketllm.evidence.ladder import load, undated
    from pocketllm.evidence.ladder.freshness import freshened
    from pocketllm.evidence.model_pages import Source

    if not records.is_dir():
        if records != RECORDS:  # a slip of the pen is not what proves nothing
            raise OptionError(f"--records {records} is no folder: nothing is read from it")
        say(f"no folder {records}: without records nothing is proved")
    pinned = {entry.name: entry.sha256 for entry in CATALOG.values()}
    evidence = load(records)
    rows = undated(evidence, records)
    rows = freshened(rows, records) if with_freshness else rows
    spoken_of = {row.architecture for row in rows} & {*known_architectures()}
    said = {name: find_family(name).capability for name in sorted(spoken_of)}
    declared = {name: {"least_activations": one.least_activations, **vars(one)} for name, one in said.items()}
    return Source(rows, evidence, pinned, declared)


def source_for(page: Path, source: "Source", pages: Sequence[Page]) -> "Source":
    """The same source for one page: with the models that have one, and where its links start (the README: the root)."""
    names = frozenset(other.stem for other, _ in pages)
    return replace(source, pages=names, root=source.root if page.parent.name == "models" else "")


def read_pages(folder: Path) -> list[Page]:
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
