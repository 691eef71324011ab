"""The program `pocketllm`, and `python -m pocketllm`: the command line without its script on the path."""

import errno
import sys


def main() -> None:
    """Run the command line; ctrl-C while it is imported ends as it does later, in a word and with 130.

    A reader that leaves (`| head`) is no failure, though click and rich end with 1 then.
    """
    try:
        from pocketllm.cli.main import app

        app(prog_name="pocketllm")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except OSError as error:  # of help and version, which are printed while the command line is read
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        from pocketllm.cli.output import EXIT_REFUSED, lead_nowhere

        print(f"error: the output: {error.strerror}; free some, or write elsewhere", file=sys.stderr)
        lead_nowhere(sys.stdout)
        sys.exit(EXIT_REFUSED)
    except SystemExit as end:
        sys.exit(0 if isinstance(end.__context__, BrokenPipeError) else end.code)


if __name__ == "__main__":
    main()
