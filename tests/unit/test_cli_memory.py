"""A command for which memory does not suffice says so in one sentence; any other surprise is still called a bug."""

import pytest
import typer

from pocketllm.cli.output import command


class OutOfMemoryError(RuntimeError):
    """As torch calls its own."""


@pytest.mark.parametrize(
    ("error", "whose"), [(OutOfMemoryError("CUDA out of memory"), "the GPU's"), (MemoryError(), "the machine's")]
)
def test_full_memory_is_one_sentence_with_what_to_do(
    error: Exception, whose: str, capsys: pytest.CaptureFixture[str]
) -> None:
    @command
    def run() -> None:
        raise error

    with pytest.raises(typer.Exit) as ended:
        run()

    said = capsys.readouterr().err
    assert ended.value.exit_code == 2
    assert said.startswith(f"error: {whose} memory is full: take a smaller --kv-cache-bytes")
    assert len(said.splitlines()) == 1


def test_any_other_surprise_is_a_bug(capsys: pytest.CaptureFixture[str]) -> None:
    @command
    def run() -> None:
        raise RuntimeError("a kernel misbehaved")

    with pytest.raises(typer.Exit) as ended:
        run()

    assert ended.value.exit_code not in (0, 2)
    assert "Traceback" in capsys.readouterr().err
