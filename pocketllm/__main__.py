"""`python -m pocketllm`: the command line without its script on the path."""

from pocketllm.cli.main import app

if __name__ == "__main__":
    app(prog_name="pocketllm")
