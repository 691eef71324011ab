"""The program `pocketllm`, and `python -m pocketllm`: the command line without its script on the path."""

import sys


def main() -> None:
    """Run the command line; ctrl-C while it is imported ends as it does later, in a word and with 130."""
    try:
        from pocketllm.cli.main import app

        app(prog_name="pocketllm")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
