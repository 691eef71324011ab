"""The drivers of `tests/cuda` say how they are called where they are called otherwise."""

import os
import subprocess
import sys

import pytest

from tests.cuda import words
from tests.cuda.interpreter import ROOT

DRIVERS = (
    *("bars", "evidence", "first_tokens"),
    *(
        "compressed",
        "draws",
        "families",
        "file",
        "hybrid",
        "indexed",
        "interpreted",
        "invariance",
        "invariant_model",
        "kernels",
    ),
    *("kimi", "latent", "latent_times", "loading", "mixtures", "model", "operations", "overlap", "plain", "recurrent"),
    *("sampled", "together"),
)
CALL_EACH = """
import runpy, sys
for name in sys.argv[1:]:
    takes_a_file = name in ("tests.cuda.overlap", "tests.cuda.sampled")
    sys.argv = [name, *["no-such-part"] * (not takes_a_file)]
    try:
        runpy.run_module(name, run_name="__main__")
    except SystemExit as end:
        print(name, end.code, file=sys.stderr)
"""


def test_words_are_known_by_what_stands_before_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["driver", "check", "rows=1,8", "llama:24"])

    assert words.asked("", ["check", "rows", "llama"]) == ["check", "rows=1,8", "llama:24"]


@pytest.mark.parametrize(
    ("given", "why"), [([], "nothing is asked for"), (["chekc"], "nothing is called chekc"), (["a=1"], "called a=1")]
)
def test_a_word_that_names_nothing_ends_with_what_there_is_and_the_usage(
    given: list[str], why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["driver", *given])
    with pytest.raises(SystemExit) as ended:
        words.asked("What it drives.\n\nusage: driver PART\n", ["check", "rates"])

    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert f"{why}; there are: check, rates\n" in told
    assert told.endswith("usage: driver PART\n")


def test_every_driver_refuses_what_it_has_not() -> None:
    modules = [f"tests.cuda.{name}" for name in DRIVERS]
    answer = subprocess.run(
        [sys.executable, "-c", CALL_EACH, *modules],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )

    assert [line for line in answer.stderr.splitlines() if line.startswith("tests.cuda.")] == [
        f"{name} 2" for name in modules
    ], answer.stderr
    assert answer.stderr.count("usage: python -m tests.cuda.") == len(modules)
    assert "SHAPE is one of 0.5b, 135m" in answer.stderr
