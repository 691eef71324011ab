"""A Hugging Face directory through every door: answers are those of the GGUF file that it would be."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pocketllm.cli.main import app
from tests.served.conftest import load_served
from tests.tiny import TinyLlama, write_llama
from tests.tiny_directory import write_directory

SPEC = TinyLlama(seed=21)
PROMPT = "Once upon a time, in 1984"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A directory, and the file with the same model."""
    folder = tmp_path_factory.mktemp("pair")
    return write_directory(folder / "twin", SPEC), write_llama(folder / "twin.gguf", SPEC)


def run(*arguments: object) -> str:
    # answers are recorded, which CI refuses
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"CI": None})
    assert result.exit_code == 0, result.output
    return result.stdout


def both(pair: tuple[Path, Path], ask: Callable[[Path], object]) -> tuple[object, object]:
    return ask(pair[0]), ask(pair[1])


def test_a_server_answers_from_a_directory_as_from_the_file(pair: tuple[Path, Path]) -> None:
    def ask(path: Path) -> object:
        served = load_served(path, backend="reference")
        try:
            text = served.complete(PROMPT, max_tokens=12, temperature=0, logprobs=2)["choices"][0]
            said = served.chat("Say more.", max_tokens=12, temperature=0)
            image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]
            refused = served.post("/v1/chat/completions", messages=[{"role": "user", "content": image}])
            assert refused.status_code == 400
            assert "has type 'image_url'; only 'text' is supported" in refused.text
            return text, said["choices"], said["usage"]
        finally:
            served.stop()
            served.engine.close()

    directory, file = both(pair, ask)
    assert directory == file


def test_generate_writes_the_same_from_a_directory_as_from_the_file(pair: tuple[Path, Path]) -> None:
    def ask(path: Path) -> object:
        settings = ("--backend", "reference", "--threads", 1, "--max-tokens", 9)
        document = json.loads(run("generate", PROMPT, "-m", path, *settings, "--json"))
        return document["text"], document["token_ids"]

    directory, file = both(pair, ask)
    assert directory == file


def test_a_golden_answer_of_a_directory_is_recorded(pair: tuple[Path, Path], tmp_path: Path) -> None:
    def ask(path: Path) -> object:
        settings = ("--backend", "reference", "--threads", 1, "--record-dir", tmp_path / "records")
        case = ("--case", "story", "--prompt", PROMPT, "--max-tokens", 6, "--fixtures", tmp_path / path.name)
        return run("golden", "record", "-m", path, *settings, *case).splitlines()[0]

    directory, file = both(pair, ask)
    assert directory == file
    assert (tmp_path / "twin" / "twin" / "story.json.pending").is_file()


def test_a_benchmark_of_a_directory_can_be_planned(pair: tuple[Path, Path], tmp_path: Path) -> None:
    engine = ("-m", pair[0], "--backend", "reference", "--threads", 1)
    assert "decode" in run("bench", "--arms", "base", "--scenario", "decode", "--plan", *engine)


def test_what_generation_config_calls_an_end_ends_an_answer_too(tmp_path: Path) -> None:
    folder = write_directory(tmp_path / "twin", SPEC)
    settings = ("--backend", "reference", "--threads", 1, "--max-tokens", 9, "--json")
    before = json.loads(run("generate", PROMPT, "-m", folder, *settings))["token_ids"]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, before[4]]}))
    after = json.loads(run("generate", PROMPT, "-m", folder, *settings))

    assert after["token_ids"] == before[: before.index(before[4]) + 1]
    assert after["finish_reason"] == "stop"


def test_more_ends_than_can_be_kept_are_refused(tmp_path: Path) -> None:
    folder = write_directory(tmp_path / "twin", SPEC)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 40, 41, 42]}))
    result = CliRunner().invoke(app, ["inspect", str(folder)])

    assert result.exit_code == 2
    assert "eos_token_id names 4 tokens that end an answer, and at most 3 are read" in result.output


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        (
            "generation_config.json",
            '{"eos_token_id": "</s>"}',
            "generation_config.json: eos_token_id is '</s>', but must be a token id",
        ),
        ("generation_config.json", '{"eos_token_id": [2, 512]}', "eos_token_id 512 is outside the vocabulary of 512"),
        ("config.json", '{"model_type": "none"}', "Hugging Face directory:"),
        ("config.json", "", "config.json cannot be read as JSON"),
    ],
)
def test_what_is_wrong_in_a_directory_is_told_with_its_path(
    file: str, content: str, sentence: str, tmp_path: Path
) -> None:
    folder = write_directory(tmp_path / "twin", SPEC)
    (folder / file).write_text(content)
    result = CliRunner().invoke(app, ["inspect", str(folder)])

    assert result.exit_code == 2
    assert f"{folder}: {sentence}" in result.output


def test_generate_asks_for_the_tokenizer_that_a_directory_lacks(tmp_path: Path) -> None:
    folder = write_directory(tmp_path / "twin", SPEC)
    (folder / "tokenizer.json").unlink()
    result = CliRunner().invoke(app, ["generate", PROMPT, "-m", str(folder), "--backend", "reference"])

    assert result.exit_code == 2
    assert "tokenizer.json in a Hugging Face directory" in result.output
