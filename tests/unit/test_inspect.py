"""`pocketllm inspect`: every architecture described, every missing piece named, nothing obeyed that a file says."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from typer.testing import CliRunner

from pocketllm.cli.inspect import page, report_on
from pocketllm.cli.main import app
from pocketllm.cli.output import printable
from pocketllm.engine.weights.checkpoint import open_checkpoint
from pocketllm.engine.weights.inspection import inspect_checkpoint
from pocketllm.errors import GGUFError
from tests.gguf_files import ARRAY, F32, STRING, array, gguf_bytes, key, tensor, text, write_checkpoint, write_shards


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["inspect", *arguments])


def report_of(path: Path) -> dict[str, Any]:
    with open_checkpoint(path) as checkpoint:
        return report_on(checkpoint)


def save(path: Path, *keys: bytes, tensors: list[bytes] | None = None, data: bytes = b"") -> Path:
    path.write_bytes(gguf_bytes([key("general.architecture", STRING, text("llama")), *keys], tensors or [], data))
    return path


class PlainFamily:
    """A family that reads every header."""

    architecture = "plain"

    class kv:  # noqa: N801  # stands for an instance
        @staticmethod
        def bytes_per_token(element_bytes: int) -> int:
            return 10 * element_bytes

        @staticmethod
        def bytes_per_sequence() -> int:
            return 8

        @staticmethod
        def window_tokens() -> int:
            return 512

        @staticmethod
        def bytes_in_window(element_bytes: int) -> int:
            return 30 * element_bytes

    def kv_spec(self, metadata: object) -> type[kv]:
        return self.kv

    def context_length(self, metadata: object) -> int:
        return 100

    def unmet(self, checkpoint: object) -> list[str]:
        return ["the plain family lacks a thing"]


# -- the report -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_runs_misses_nothing(tiny_gguf: Path) -> None:
    report = report_of(tiny_gguf)

    assert (report["architecture"], report["family"], report["runs"]) == ("llama", "llama", True)
    assert report["missing"] == report["errors"] == []
    with open_checkpoint(tiny_gguf) as checkpoint:
        assert report["num_tensors"] == len(checkpoint.tensors)
        assert report["num_parameters"] == sum(checkpoint.values(name).size for name in checkpoint.tensors)
    assert sum(row["bytes"] for row in report["quant_types"]) == report["memory"]["weights_bytes"]


@pytest.mark.model
def test_the_default_model_is_described_to_the_byte(smollm2: Path) -> None:
    report = report_of(smollm2)

    assert report["name"] == "smollm2-135m"
    assert report["runs"] is True
    assert report["num_parameters"] == 134_515_008
    assert {row["type"]: (row["tensors"], row["bytes"]) for row in report["quant_types"]} == {
        "Q4_1": (210, 66_355_200),
        "Q8_0": (1, 30_081_024),
        "F32": (61, 140_544),
    }
    # 30 layers, 3 heads of 64 keys and 64 values
    assert report["memory"]["kv_bytes_per_token"] == {"float16": 23_040, "float32": 46_080}
    assert report["memory"]["kv_bytes_context"]["float16"] == 23_040 * 8192
    assert report["tokenizer"] == {"model": "gpt2", "pre": "smollm", "num_tokens": 49_152, "has_chat_template": True}


def test_an_unknown_architecture_is_named_with_the_known_ones(tmp_path: Path) -> None:
    report = report_of(write_checkpoint(tmp_path / "x.gguf", {"a": np.ones(4, np.float32)}, architecture="foo-bar"))

    assert report["family"] is None
    assert report["runs"] is False
    assert any("no model family 'foo-bar'; known: " in reason and "llama" in reason for reason in report["missing"])


def test_every_missing_piece_is_listed_at_once(tmp_path: Path) -> None:
    keys = [key("tokenizer.ggml.model", STRING, text("zzz"))]
    rows = [tensor("a", [8], 26), tensor("b", [32], 250, offset=32), tensor("c", [32], 250, offset=64)]
    missing = "\n".join(report_of(save(tmp_path / "x.gguf", *keys, tensors=rows, data=b"\0" * 96))["missing"])

    assert "quant type I32 has no decoder; decodable are BF16" in missing
    assert "(1 tensors, such as a: id 26)" in missing
    assert "quant type TYPE_250 has no decoder" in missing
    assert "(2 tensors, such as b: id 250)" in missing
    assert "tokenizer.ggml.model is 'zzz'" in missing
    assert "llama.block_count" in missing


def test_an_unknown_pre_tokenizer_is_named(tmp_path: Path) -> None:
    names = {"tokenizer__ggml__model": "gpt2", "tokenizer__ggml__pre": "zzz", "tokenizer__ggml__tokens": ["a", "b"]}
    report = report_of(write_checkpoint(tmp_path / "x.gguf", {"a": np.ones(4, np.float32)}, **names))

    assert any("tokenizer.ggml.pre 'zzz' is not known; known: " in reason for reason in report["missing"])
    assert report["tokenizer"]["num_tokens"] == 2


def test_a_familys_reasons_and_sizes_are_its_own(tiny_gguf: Path) -> None:
    with open_checkpoint(tiny_gguf) as checkpoint:
        report = inspect_checkpoint(checkpoint, PlainFamily(), ["a tokenizer's reason"])

    assert report["missing"] == ["the plain family lacks a thing", "a tokenizer's reason"]
    assert report["memory"]["kv_bytes_per_token"] == {"float16": 20, "float32": 40}
    assert report["memory"]["kv_bytes_context"] == {"float16": 2000, "float32": 4000}
    assert report["memory"]["state_bytes_per_request"] == 8
    assert report["memory"]["window_tokens"] == 512
    assert report["memory"]["window_bytes_per_token"] == {"float16": 60, "float32": 120}
    assert report["memory"]["source"] == "family plain"


def test_a_header_that_its_family_cannot_read_is_a_reason_and_no_crash(tiny_gguf: Path) -> None:
    class Refusing(PlainFamily):
        def kv_spec(self, metadata: object) -> type[PlainFamily.kv]:
            raise GGUFError("plain.block_count is missing")

        def unmet(self, checkpoint: object) -> list[str]:
            raise GGUFError("plain.block_count is missing")

    with open_checkpoint(tiny_gguf) as checkpoint:
        report = inspect_checkpoint(checkpoint, Refusing())

    assert report["missing"] == ["plain.block_count is missing"]
    assert report["memory"]["kv_bytes_per_token"] is None


@pytest.mark.parametrize(("heads", "expected"), [(4, 2 * 4 * 64), ([4, 2], 6 * 64), ([4], None), ("x", 2 * 8 * 64)])
def test_a_cache_without_a_family_is_estimated(tmp_path: Path, heads: Any, expected: int | None) -> None:
    keys: dict[str, Any] = {
        "foo__block_count": 2,
        "foo__embedding_length": 256,
        "foo__attention__head_count": 8,
        "foo__attention__head_count_kv": heads,
        "foo__context_length": 1000,
    }
    values = {f"t{i}": np.ones(4, np.float32) for i in range(4)}
    memory = report_of(write_checkpoint(tmp_path / "x.gguf", values, architecture="foo", **keys))["memory"]

    assert memory["kv_bytes_per_token"] == (expected and {"float16": 2 * expected, "float32": 4 * expected})
    assert memory["context_length"] == 1000


def test_a_file_without_an_architecture_is_still_described(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_bytes([], [tensor("a", [2])], b"\0" * 8))
    report = report_of(path)

    assert report["architecture"] is None
    assert report["num_parameters"] == 2
    assert "no model family '(none named)'" in report["missing"][0]


def test_values_that_json_cannot_carry_are_told_as_text(tmp_path: Path) -> None:
    nan = np.array([np.nan, np.inf, 1.0], "<f4")
    path = save(tmp_path / "x.gguf", key("a", F32, nan[:1].tobytes()), key("b", ARRAY, array(F32, 3, nan.tobytes())))
    result = run(str(path), "--json")
    metadata = json.loads(result.stdout)["metadata"]

    assert result.exit_code == 0
    assert metadata["a"] == "nan"
    assert metadata["b"] == {"array": "float32", "count": 3, "first": ["nan", "inf", 1.0]}


def test_a_damaged_text_is_an_error_of_the_report_and_hides_nothing_else(tmp_path: Path) -> None:
    report = report_of(save(tmp_path / "x.gguf", key("bad", STRING, text(b"\xff")), key("good", STRING, text("yes"))))

    assert len(report["errors"]) == 1
    assert "'bad' is not UTF-8" in report["errors"][0]
    assert report["metadata"]["good"] == "yes"
    assert report["runs"] is False


def test_a_damaged_header_does_not_run_even_when_nothing_is_missing(tmp_path: Path) -> None:
    class Willing(PlainFamily):
        def unmet(self, checkpoint: object) -> list[str]:
            return []

    for bad, runs in ((b"\xff", False), (b"ok", True)):
        with open_checkpoint(save(tmp_path / "x.gguf", key("note", STRING, text(bad)))) as checkpoint:
            report = inspect_checkpoint(checkpoint, Willing())
        assert (report["missing"], report["runs"]) == ([], runs)


def test_a_very_long_text_is_cut(tmp_path: Path) -> None:
    report = report_of(save(tmp_path / "x.gguf", key("long", STRING, text("x" * 100_000))))

    assert report["metadata"]["long"].endswith("… (cut: 100000 characters)")


@pytest.mark.parametrize("kind", [kind for kind in gguf.GGMLQuantizationType if kind.name != "Q8_1"])
def test_every_known_type_is_sized(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    elements, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    path = save(tmp_path / "x.gguf", tensors=[tensor("a", [elements, 3], kind.value)], data=b"\0" * 3 * num_bytes)

    row = report_of(path)["quant_types"][0]
    assert (row["type"], row["bytes"], row["parameters"]) == (kind.name, 3 * num_bytes, 3 * elements)
    assert row["bits_per_weight"] == round(8 * num_bytes / elements, 3)


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_page_fits_80_columns_and_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    names = {"general__name": "A name", "general__tags": ["tag"] * 50, "general__description": "word " * 100}
    path = write_checkpoint(tmp_path / "x.gguf", {"blk.0." + "n" * 70: np.ones(4, np.float32)}, "foo", **names)
    result = run(str(path), "--tensors")

    assert result.exit_code == 0
    assert max(len(line) for line in result.stdout.splitlines()) <= 80
    assert "no model family 'foo'" in result.stdout
    assert "50 x string: [tag, tag" in result.stdout
    assert "(500 characters)" in " ".join(result.stdout.split())


def test_a_pipe_gets_every_line_whole(tmp_path: Path) -> None:
    names = {"general__tags": ["a tag of many letters"] * 50, "blk__key": "word " * 12}
    path = write_checkpoint(tmp_path / "x.gguf", {"blk.0." + "n" * 90: np.ones(4, np.float32)}, "foo", **names)
    lines = [" ".join(line.split()) for line in run(str(path), "--tensors").stdout.splitlines()]

    assert f"blk.0.{'n' * 90} 4 F32 16" in lines
    assert f"general.tags 50 x string: [{'a tag of many letters, ' * 6}…]" in lines
    assert any(line.startswith("no no model family 'foo'; known: deepseek2,") and "xing4_0" in line for line in lines)


def test_a_long_key_stays_in_one_piece_beside_a_long_value(tmp_path: Path) -> None:
    key = "foo__attention__layer_norm_rms_epsilon_of_the_indexer"
    names = {key: 1e-6, "general__description": "word " * 100}
    path = write_checkpoint(tmp_path / "x.gguf", {"a": np.ones(4, np.float32)}, "foo", **names)
    assert key.replace("__", ".") in run(str(path)).stdout


def test_tensors_are_listed_only_when_asked(tiny_gguf: Path) -> None:
    assert "blk.0.attn_q.weight" not in run(str(tiny_gguf)).stdout
    assert "blk.0.attn_q.weight" in run(str(tiny_gguf), "--tensors").stdout
    assert "blk.0.attn_q.weight" in run(str(tiny_gguf), "--json").stdout


def test_nothing_in_a_file_reaches_the_terminal_as_a_command(tmp_path: Path) -> None:
    evil = "\x1b]0;owned\x07[red]\n\u202e"
    path = save(
        tmp_path / "x.gguf",
        key("general.name", STRING, text(evil)),
        key("key\x1b[2J", STRING, text(evil)),
        tensors=[tensor("t\x1b[2J", [1])],
        data=b"\0" * 4,
    )
    shown = page(report_of(path), with_tensors=True)

    assert not set(shown) & {"\x1b", "\x07", "\u202e"}
    assert "[red]" in shown
    assert printable("ü🙂") == "ü🙂"


def test_a_split_set_is_inspected_as_one(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    report = json.loads(run(str(paths[1]), "--json").stdout)

    assert [item["name"] for item in report["files"]] == [path.name for path in paths]
    assert report["num_tensors"] == 3


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("no-such-model", "error: no model named 'no-such-model'"),
        ("absent.gguf", "error: no such file: 'absent.gguf'"),
        (".", "is a directory"),
    ],
)
def test_a_wrong_argument_is_one_sentence_and_exit_code_2(argument: str, message: str) -> None:
    result = run(argument)

    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1


def test_a_record_folder_without_a_record_is_refused(tiny_gguf: Path, tmp_path: Path) -> None:
    result = run(str(tiny_gguf), "--record-dir", str(tmp_path))

    assert result.exit_code == 2
    assert "--record-dir needs --record" in result.stderr


def test_a_record_keeps_the_report_and_a_row_a_tensor(tiny_gguf: Path, tmp_path: Path) -> None:
    from pocketllm.evidence.store import read_record

    result = run(str(tiny_gguf), "--json", "--record", "--record-dir", str(tmp_path))
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    record = read_record(next(tmp_path.glob("*.parquet")))

    assert record.kind == "inspect"
    assert record.complete
    assert record.document["report"]["errors"] == []
    assert record.document["report"]["num_parameters"] == report["num_parameters"]
    assert record.document["model"]["architecture"] == "llama"
    assert [row["tensor"] for row in record.row_dicts] == [item["name"] for item in report["tensors"]]


def test_a_record_folder_that_cannot_be_written_is_one_sentence(tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run(str(tiny_gguf), "--record", "--record-dir", str(tmp_path / "file" / "x"))

    assert result.exit_code == 2
    assert "error: cannot write records to" in result.stderr


def test_inspecting_needs_no_torch_and_survives_a_closed_pipe(tiny_gguf: Path) -> None:
    code = (
        "import sys\n"
        "from pocketllm.cli.main import app\n"
        f"app(['inspect', {str(tiny_gguf)!r}], standalone_mode=False)\n"
        "print([name for name in ('torch', 'pandas', 'pyarrow', 'tokenizers') if name in sys.modules])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"

    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", "from pocketllm.cli.main import app; app()", "inspect", str(tiny_gguf), "--json"]
    closed = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert closed.returncode == 0
    assert closed.stderr == ""


def test_a_vocabulary_of_262144_tokens_is_inspected_quickly(tmp_path: Path) -> None:
    count = 262_144
    words = b"".join(text(f"token{i}") for i in range(count))
    keys = [key("foo.tokens", ARRAY, array(STRING, count, words))]
    path = save(tmp_path / "x.gguf", *keys)
    began = time.process_time()
    report_of(path)

    assert time.process_time() - began < 1
