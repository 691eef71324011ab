"""`pocketllm golden`: record proposes an answer, a person accepts it, verify asks for it again; one file a concern."""

import typer

from pocketllm.cli.golden import accepting, recording, review, show, verify
from pocketllm.cli.output import command

COMMANDS = (
    ("verify", verify.verify, verify.EPILOG),
    ("record", recording.record, recording.EPILOG),
    ("review", review.review, "Example:\n\npocketllm golden review"),
    ("accept", accepting.accept, accepting.EPILOG),
    ("prune", accepting.prune, "Example:\n\npocketllm golden prune --yes"),
    ("suggest", recording.suggest, recording.SUGGEST_EPILOG),
    ("show", show.show, "Examples:\n\npocketllm golden show\n\npocketllm golden show --case capital"),
)


def register(app: typer.Typer) -> None:
    """Add this command to the app."""
    group = typer.Typer(
        help="Does this checkpoint, through this entry point, still give these tokens?",
        epilog="Example: pocketllm golden verify",
        no_args_is_help=True,
    )
    for name, function, epilog in COMMANDS:
        group.command(name, epilog=epilog)(command(function))
    app.add_typer(group, name="golden")
