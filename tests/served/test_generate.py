import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from pocketllm.cli.main import app

REPORT_KEYS = {"model", "prompt_token_ids", "token_ids", "text", "finish_reason", "usage", "timings", "plan", "seed"}


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("POCKETLLM_") and name != "POCKETLLM_CACHE"]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def generate(*arguments: str, standard_input: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, ["generate", *arguments], input=standard_input)


def tiny(tiny_gguf: Path, *arguments: str, standard_input: str | bytes | None = None) -> Result:
    return generate("--model", str(tiny_gguf), "--ignore-eos", *arguments, standard_input=standard_input)


def report(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


# -- answers
def test_text_goes_to_stdout_and_nothing_else_anywhere(tiny_gguf: Path) -> None:
    streamed = tiny(tiny_gguf, "hello", "-n", "6")
    whole = tiny(tiny_gguf, "hello", "-n", "6", "--no-stream")
    document = report(tiny(tiny_gguf, "hello", "-n", "6", "--json"))

    assert streamed.exit_code == 0
    assert streamed.stdout == whole.stdout == document["text"] + "\n"
    assert streamed.stderr == whole.stderr == ""


def test_the_json_document_has_what_was_promised(tiny_gguf: Path) -> None:
    document = report(tiny(tiny_gguf, "hello", "-n", "6", "--json", "--seed", "7", "--logprobs", "2"))

    assert set(document) >= REPORT_KEYS
    assert set(document["timings"]) >= {"load_s", "ttft_s", "prefill_s", "decode_s"}
    assert document["usage"]["completion_tokens"] == len(document["token_ids"]) == 6
    assert document["usage"]["prompt_tokens"] == len(document["prompt_token_ids"])
    assert document["finish_reason"] == "length"
    assert document["seed"] == 7
    assert [entry["top_ids"][0] for entry in document["logprobs"]] == document["token_ids"]
    assert document["plan"]["architecture"] == "llama"
    assert document["plan"]["sources"]["model"] == "flag"


def test_the_default_gives_the_same_answer_each_time(tiny_gguf: Path) -> None:
    first, second = (report(tiny(tiny_gguf, "hello", "-n", "6", "--json")) for _ in range(2))

    assert first["token_ids"] == second["token_ids"]


def test_a_reported_seed_gives_the_same_answer_again(tiny_gguf: Path) -> None:
    first = report(tiny(tiny_gguf, "hello", "-n", "6", "-t", "1", "--json"))
    second = report(tiny(tiny_gguf, "hello", "-n", "6", "-t", "1", "--json", "--seed", str(first["seed"])))

    assert first["token_ids"] == second["token_ids"]


@pytest.mark.parametrize("arguments", [("-",), ()])
def test_a_prompt_may_come_on_standard_input(tiny_gguf: Path, arguments: tuple[str, ...]) -> None:
    piped = report(tiny(tiny_gguf, *arguments, "-n", "3", "--json", standard_input="hello"))

    assert piped["prompt_token_ids"] == report(tiny(tiny_gguf, "hello", "-n", "3", "--json"))["prompt_token_ids"]


def test_a_stop_string_ends_the_text_and_is_left_out(tiny_gguf: Path) -> None:
    text = report(tiny(tiny_gguf, "hello", "-n", "12", "--json"))["text"]
    stop = text[len(text) // 2 :][:2]
    document = report(tiny(tiny_gguf, "hello", "-n", "12", "--json", "--stop", stop))

    assert document["text"] == text[: text.index(stop)]
    assert (document["finish_reason"], document["stop_string"]) == ("stop", stop)


def test_without_max_tokens_a_short_context_is_filled(tiny_gguf: Path) -> None:
    document = report(tiny(tiny_gguf, "hello", "--max-model-len", "40", "--json"))

    assert document["usage"]["total_tokens"] == 40
    assert document["finish_reason"] == "length"


def test_verbose_tells_phases_apart_on_stderr(tiny_gguf: Path) -> None:
    result = tiny(tiny_gguf, "hello", "-n", "6", "-v")

    assert "loading llama" in result.stderr
    assert "prefill" in result.stderr
    assert "decode 5 tokens" in result.stderr


@pytest.mark.model
def test_chat_names_paris(smollm2: Path) -> None:
    question = "Name the capital of France."
    document = report(generate("--model", str(smollm2), "--chat", question, "--temperature", "0", "--json"))

    assert "Paris" in document["text"]
    assert document["finish_reason"] == "stop"


@pytest.mark.model
def test_a_system_message_goes_before_the_chat(smollm2: Path) -> None:
    from pocketllm import LLM

    arguments = ("--model", str(smollm2), "--chat", "hi", "--system", "You are terse.", "-n", "1", "--json")
    messages = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": "hi"}]
    with LLM(model=str(smollm2)) as llm:
        expected = llm.chat_token_ids(messages)

    assert report(generate(*arguments))["prompt_token_ids"] == expected


# -- what cannot be done is said in one sentence
def refusal(result: Result) -> str:
    """The message of a command that refused: exit 2, one line on stderr, nothing on stdout."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    return lines[0]


def test_a_file_that_is_not_there() -> None:
    assert "nowhere.gguf" in refusal(generate("--model", "nowhere.gguf", "hello"))


def test_a_directory(tmp_path: Path) -> None:
    assert "directory" in refusal(generate("--model", str(tmp_path), "hello"))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_checkpoint(tiny_gguf: Path, tmp_path: Path, share: float) -> None:
    data = tiny_gguf.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[: int(len(data) * share)])

    assert "cut.gguf" in refusal(generate("--model", str(path), "hello"))


CUT_AFTER_THE_PLAN = """
import os, sys
from pocketllm.cli.main import app
from pocketllm.engine import load

num_bytes = int(sys.argv.pop())

def planned_and_cut(options, checkpoint, name):
    made = plan_and_open(options, checkpoint, name)
    os.truncate(checkpoint.path, num_bytes)
    return made

plan_and_open, load.plan_and_open = load.plan_and_open, planned_and_cut
app()
"""


@pytest.mark.parametrize("command", [("generate", "hello"), ("serve", "--port=0")])
@pytest.mark.parametrize("num_bytes", [0, 100_000])
def test_a_checkpoint_that_is_cut_between_plan_and_load(
    tiny_gguf: Path, tmp_path: Path, command: tuple[str, ...], num_bytes: int
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_gguf.read_bytes())
    words = [sys.executable, "-c", CUT_AFTER_THE_PLAN, *command, "--model", str(path), str(num_bytes)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)

    # a mapping would end the process with SIGBUS here
    assert done.returncode == 2
    assert "error: model.gguf was changed while it was being loaded: " in done.stderr
    assert f"now the file has {num_bytes} bytes" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_architecture_lists_the_known_ones(tiny_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(tiny_gguf.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0odder", 1))
    message = refusal(generate("--model", str(path), "hello"))

    assert "odder" in message
    assert "known: " in message
    assert "llama" in message


@pytest.mark.parametrize(("type_id", "part"), [(26, "I32"), (250, "250")])
def test_a_quant_type_that_cannot_be_decoded_names_a_tensor(
    tiny_gguf: Path, tmp_path: Path, type_id: int, part: str
) -> None:
    data = bytearray(tiny_gguf.read_bytes())
    name = b"blk.0.attn_q.weight"
    at = data.index(name) + len(name)
    (num_dims,) = struct.unpack_from("<I", data, at)
    struct.pack_into("<I", data, at + 4 + 8 * num_dims, type_id)
    path = tmp_path / "odd.gguf"
    path.write_bytes(data)
    message = refusal(generate("--model", str(path), "--backend", "reference", "hello"))

    assert part in message
    assert "blk.0.attn_q.weight" in message


@pytest.mark.parametrize("standard_input", ["", None])
def test_an_empty_prompt(tiny_gguf: Path, standard_input: str | None) -> None:
    arguments = [] if standard_input is None else ["-"]

    assert "prompt is empty" in refusal(tiny(tiny_gguf, *arguments, standard_input=standard_input))
    assert "prompt is empty" in refusal(tiny(tiny_gguf, ""))


def test_a_model_file_in_the_prompt_s_place_is_refused_and_shown_its_option(tiny_gguf: Path) -> None:
    message = refusal(generate(str(tiny_gguf)))

    assert f"--model {tiny_gguf}" in message


def test_a_name_that_only_looks_like_a_model_file_is_a_prompt(tiny_gguf: Path) -> None:
    assert tiny(tiny_gguf, "absent.gguf", "-n", "2").exit_code == 0


def test_an_answer_that_is_cut_before_its_form_is_whole_is_told(tiny_gguf: Path) -> None:
    cut = tiny(tiny_gguf, "hello", "-n", "2", "--regex", "[ab]{40}")
    free = tiny(tiny_gguf, "hello", "-n", "2")

    assert cut.exit_code == 0
    assert cut.stderr == "note: the answer was cut at 2 tokens and may break off in the middle of its form\n"
    assert free.stderr == ""


def test_a_schema_in_the_place_of_its_file_is_told_where_it_belongs(tiny_gguf: Path) -> None:
    message = refusal(tiny(tiny_gguf, "hello", "--json-schema", '{"type": "object"}'))

    assert "names a file" in message


def test_a_prompt_longer_than_the_context_is_told_with_counts(tiny_gguf: Path) -> None:
    message = refusal(tiny(tiny_gguf, "word " * 300, "--max-model-len", "50"))

    assert "max_model_len=50" in message
    assert any(word.isdigit() and int(word) > 50 for word in message.split())


def test_a_prompt_that_is_not_utf8(tiny_gguf: Path) -> None:
    assert "not UTF-8" in refusal(tiny(tiny_gguf, "-", standard_input=b"ab\xff"))


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--max-tokens", "0"), "max_tokens=0 must be at least 1"),
        (("--max-tokens", "100000"), "max_tokens=100000"),
        (("--temperature", "nan"), "temperature=nan"),
        (("--temperature", "-1"), "temperature=-1.0"),
        (("--top-p", "0"), "top_p=0.0"),
        (("--top-k", "-2"), "top_k=-2"),
        (("--logprobs", "21", "--json"), "logprobs=21"),
        (("--logprobs", "1"), "--logprobs needs --json"),
        (("--stop", ""), "stop: a string"),
        (("--max-model-len", "0"), "--max-model-len 0 must be at least 2"),
        (("--max-model-len", "1000000"), "1000000"),
        (("--threads", "0"), "--threads 0 must be at least 1"),
        (("--backend", "abacus"), "abacus"),
        (("--system", "be brief"), "--system goes with --chat"),
        (("--chat", "hello"), "not both"),
    ],
)
def test_a_bad_value(tiny_gguf: Path, arguments: tuple[str, ...], part: str) -> None:
    assert part in refusal(tiny(tiny_gguf, "hello", *arguments))


def test_a_number_that_is_none_is_refused_by_the_parser(tiny_gguf: Path) -> None:
    result = tiny(tiny_gguf, "hello", "--max-tokens", "many")

    assert result.exit_code == 2
    assert "--max-tokens" in result.stderr


def test_a_bad_environment_variable_is_named(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POCKETLLM_PREFILL_CHUNK", "lots")

    assert "POCKETLLM_PREFILL_CHUNK" in refusal(tiny(tiny_gguf, "hello"))


def test_chat_without_a_template_is_refused(tiny_gguf: Path, tmp_path: Path) -> None:
    # the template's key is renamed in place, so that the file has none
    path = tmp_path / "plain.gguf"
    path.write_bytes(tiny_gguf.read_bytes().replace(b"tokenizer.chat_template", b"tokenizer.shut_template"))

    assert "no chat template" in refusal(generate("--model", str(path), "--chat", "hello"))


# -- ctrl-C and closed pipes, in a process of their own
COMMAND = [sys.executable, "-c", "from pocketllm.cli.main import app; app()", "generate", "--ignore-eos"]


def start(tiny_gguf: Path, *arguments: str, step_delay: float = 0.0) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [*COMMAND, "--model", str(tiny_gguf), "hello", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "POCKETLLM_TEST_STEP_DELAY": str(step_delay)},
    )


def test_ctrl_c_keeps_what_was_printed_and_exits_130(tiny_gguf: Path) -> None:
    with start(tiny_gguf, "-n", "400", step_delay=10.0) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)

    assert process.returncode == 130
    assert len(first + rest) > 1
    assert b"Traceback" not in errors


def test_ctrl_c_with_json_prints_the_partial_document(tiny_gguf: Path) -> None:
    with start(tiny_gguf, "-n", "400", "--json", "-v", step_delay=10.0) as process:  # in 40 ms otherwise
        assert process.stderr is not None
        while b"ready" not in process.stderr.readline():
            pass
        time.sleep(0.1)  # by then it generates, and it will for longer than that
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    document = json.loads(output)

    assert process.returncode == 130, errors
    assert document["finish_reason"] == "cancelled"
    assert len(document["token_ids"]) < 400


def test_a_reader_that_goes_away_ends_the_command_quietly(tiny_gguf: Path) -> None:
    with start(tiny_gguf, "-n", "400") as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.stdout.close()
        errors = process.stderr.read() if process.stderr else b""
        process.wait(timeout=60)

    assert process.returncode == 0
    assert errors == b""


def test_a_terminal_that_cannot_show_a_character_gets_its_escape(tiny_gguf: Path) -> None:
    command = [*COMMAND, "--model", str(tiny_gguf), "hello", "-n", "12"]
    done = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}, timeout=60)

    assert done.returncode == 0, done.stderr
    assert b"\\u" in done.stdout


def test_help_shows_how_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; from pocketllm.cli.main import app\n"
        "try: app(['generate', '--help'])\n"
        "finally: print(sorted({'torch', 'numpy', 'tokenizers', 'jinja2'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)

    assert done.returncode == 0
    assert "Examples" in done.stdout
    assert done.stdout.strip().endswith("[]")
