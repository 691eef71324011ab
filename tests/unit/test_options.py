from pathlib import Path
from typing import Any

import pytest

from pocketllm.engine.options import SWITCHABLE, EngineOptions, as_flag, option_names, resolve_options
from pocketllm.errors import OptionError


def write_project(folder: Path, text: str) -> Path:
    (folder / "pocketllm.toml").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("flag", "variable", "file_value", "expected", "source"),
    [
        (3, "4", 5, 3, "flag"),
        (3, None, None, 3, "flag"),
        (None, "4", 5, 4, "environment POCKETLLM_MAX_NUM_SEQS"),
        (None, "4", None, 4, "environment POCKETLLM_MAX_NUM_SEQS"),
        (None, None, 5, 5, "file pocketllm.toml"),
        (None, None, None, None, "default"),
    ],
)
def test_the_most_explicit_place_wins_and_is_remembered(
    tmp_path: Path, flag: int | None, variable: str | None, file_value: int | None, expected: int | None, source: str
) -> None:
    environment = {} if variable is None else {"POCKETLLM_MAX_NUM_SEQS": variable}
    write_project(tmp_path, "" if file_value is None else f"[engine]\nmax_num_seqs = {file_value}\n")
    options = resolve_options({"max_num_seqs": flag}, environment, tmp_path)

    assert options.max_num_seqs == expected
    assert options.sources["max_num_seqs"] == source


def test_without_anything_said_all_values_are_the_defaults(tmp_path: Path) -> None:
    options = resolve_options({}, {}, tmp_path)

    assert options == EngineOptions()
    assert set(options.sources.values()) == {"default"}
    assert set(options.sources) == set(options.as_dict()) == set(option_names())


@pytest.mark.parametrize(
    ("flags", "environment", "file_text", "parts"),
    [
        ({"max_num_seqs": 0}, {}, "", ["--max-num-seqs 0 must", "at least 1"]),
        ({"max_model_len": -5}, {}, "", ["--max-model-len -5"]),
        ({}, {"POCKETLLM_THREADS": "0"}, "", ["threads=0", "POCKETLLM_THREADS"]),
        ({"max_model_len": 10**400}, {}, "", ["--max-model-len 1000", "must fit 64 bits"]),
        ({"kv_cache_bytes": 1 << 63}, {}, "", ["--kv-cache-bytes 9223372036854775808 must fit 64 bits"]),
        ({"threads": 1 << 32 | 1}, {}, "", ["--threads 4294967297 must", "at most 4096"]),
        ({}, {"POCKETLLM_THREADS": "two"}, "", ["POCKETLLM_THREADS", "'two'", "whole number"]),
        ({}, {"POCKETLLM_RESERVE": "nan"}, "", ["reserve=nan", "POCKETLLM_RESERVE", "between 0 and 1"]),
        ({}, {"POCKETLLM_BLOCK_SIZE": "1.5"}, "", ["POCKETLLM_BLOCK_SIZE", "whole number"]),
        ({"kv_dtype": "fp4"}, {}, "", ["--kv-dtype 'fp4' is", "float16, bfloat16, fp8_e4m3, int8, float32"]),
        ({}, {"POCKETLLM_ACTIVATION_DTYPE": "int4"}, "", ["activation_dtype='int4'", "int8, mixed, int16, float32"]),
        ({}, {"POCKETLLM_MODEL": " "}, "", ["model", "POCKETLLM_MODEL", "empty"]),
        ({}, {}, "[engine]\nreserve = 1.5\n", ["reserve=1.5", "pocketllm.toml"]),
        ({}, {}, "[engine]\nprefill_chunk = 1.5\n", ["pocketllm.toml", "prefill_chunk=1.5", "whole number"]),
        ({}, {}, "[engine]\nmax_num_seqs = true\n", ["pocketllm.toml", "max_num_seqs=True", "whole number"]),
        ({}, {}, "[engine]\nmodel = 5\n", ["pocketllm.toml", "model=5", "text"]),
        ({}, {"POCKETLLM_PREFIX_CACHE": "maybe"}, "", ["POCKETLLM_PREFIX_CACHE", "'maybe'", "neither true nor false"]),
        ({}, {}, "[engine]\nprefix_cache = 1\n", ["pocketllm.toml", "prefix_cache=1", "neither true nor false"]),
        ({}, {}, "[engine]\nblock_size = inf\n", ["pocketllm.toml", "block_size=inf"]),
        ({}, {}, "[engine]\nwidth = 3\n", ["pocketllm.toml", "'width'", "max_num_seqs"]),
        ({}, {}, "engine = 3\n", ["pocketllm.toml", "table"]),
        ({}, {}, "threads = 2\n", ["pocketllm.toml", "'threads'", "[engine]"]),
        ({"max_model_len": 1}, {}, "", ["--max-model-len 1 must be at least 2", "prompt", "answer"]),
        ({}, {}, "[engin]\nthreads = 2\n", ["pocketllm.toml", "unknown table [engin]", "known: [engine]"]),
        ({}, {}, "[engine\n", ["pocketllm.toml", "not valid TOML"]),
        ({"widht": 3}, {}, "", ["'widht'", "known"]),
        (
            {"max_num_batched_tokens": 4},
            {"POCKETLLM_MAX_NUM_SEQS": "8"},
            "",
            ["--max-num-batched-tokens 4 is below", "max_num_seqs=8 (environment POCKETLLM_MAX_NUM_SEQS)"],
        ),
    ],
)
def test_a_bad_value_is_refused_naming_its_place(
    tmp_path: Path, flags: dict[str, Any], environment: dict[str, str], file_text: str, parts: list[str]
) -> None:
    write_project(tmp_path, file_text)
    with pytest.raises(OptionError) as caught:
        resolve_options(flags, environment, tmp_path)

    for part in parts:
        assert part in str(caught.value)


def test_a_project_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pocketllm.toml").write_bytes(b"\xff\xfe")

    with pytest.raises(OptionError, match=r"pocketllm\.toml"):
        resolve_options({}, {}, tmp_path)


def test_a_project_file_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pocketllm.toml").mkdir()

    with pytest.raises(OptionError, match="cannot be read"):
        resolve_options({}, {}, tmp_path)


def test_an_empty_variable_is_one_that_is_not_set(tmp_path: Path) -> None:
    write_project(tmp_path, "[engine]\nthreads = 2\n")

    assert resolve_options({}, {"POCKETLLM_THREADS": ""}, tmp_path).sources["threads"] == "file pocketllm.toml"


def test_a_whole_float_from_the_file_is_a_whole_number(tmp_path: Path) -> None:
    write_project(tmp_path, "[engine]\nreserve = 1\nkv_cache_bytes = 1e9\n")
    options = resolve_options({}, {}, tmp_path)

    assert (options.reserve, options.kv_cache_bytes) == (1.0, 1_000_000_000)


@pytest.mark.parametrize(("text", "expected"), [("true", True), ("0", False), ("No", False), ("on", True)])
def test_a_switch_can_be_said_in_words(tmp_path: Path, text: str, expected: bool) -> None:
    assert resolve_options({}, {"POCKETLLM_PREFIX_CACHE": text}, tmp_path).prefix_cache is expected
    assert resolve_options({"prefix_cache": expected}, {}, tmp_path).prefix_cache is expected


def test_switchable_options_are_options() -> None:
    assert set(option_names()) >= SWITCHABLE


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("name", ["prefix_cache", "overlap"])
def test_a_switch_as_a_flag_is_one_that_serve_takes(name: str, value: bool) -> None:
    from typer.main import get_command

    from pocketllm.cli.main import app

    serve = get_command(app).get_command(None, "serve")  # type: ignore[attr-defined]  # a group
    taken = serve.make_context("serve", [as_flag(name, value)]).params

    assert taken[name] is value
