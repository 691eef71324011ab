"""`pocketllm golden show`: what is recorded."""

from pocketllm.cli import output
from pocketllm.cli.engine_options import Model, engine_options
from pocketllm.cli.golden.flags import AsJson, Cases, Fixtures, check_folder, folder_of
from pocketllm.cli.loading import say_fetches


def show(model: Model = None, cases: Cases = None, fixtures: Fixtures = None, as_json: AsJson = False) -> None:
    """Every case and its answers at a glance; with --case, position by position with tokens and provenance."""
    from pocketllm.golden.reports import listing
    from pocketllm.golden.reports.console import open_console
    from pocketllm.golden.subject import open_subject

    check_folder(fixtures)
    subject = open_subject(engine_options(model=model), progress=say_fetches)
    folder = folder_of(subject, fixtures)
    found = folder.cases(cases or ())
    if as_json:
        output.write_json(listing.as_json(folder, found))
        return
    if not found:
        output.say(f"no case is recorded in {folder.label()}")
        return
    console = open_console(highlight=False)
    if not cases:
        listing.show_all(folder, found, console)
    for case in found if cases else ():
        listing.show_one(folder, case, subject.prompts.token_text, console)
