"""Checkpoints: one file or a split set, and every way in which a path is neither."""

import hashlib
import os
import shutil
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from pocketllm.engine.weights.checkpoint import open_checkpoint, shard_paths
from pocketllm.errors import CheckpointError, GGUFError, UnsupportedFeatureError
from tests.gguf_files import STRING, U32, gguf_bytes, key, tensor, text, write_checkpoint, write_shards

ARCHITECTURE = key("general.architecture", STRING, text("llama"))


# -- one file ---------------------------------------------------------------------------------------------------------


def test_a_checkpoint_tells_its_tensors_values_and_types(tmp_path: Path) -> None:
    values = {"a": np.arange(64, dtype=np.float32).reshape(2, 32), "b": np.ones(3, np.float16)}
    path = write_checkpoint(tmp_path / "x.gguf", values, general__name="X")
    checkpoint = open_checkpoint(path)

    assert checkpoint.architecture == "llama"
    assert checkpoint.metadata["general.name"] == "X"
    assert checkpoint.files == (path,)
    assert checkpoint.num_bytes == path.stat().st_size
    assert checkpoint.quant_histogram() == {"F32": (1, 256), "F16": (1, 6)}
    assert checkpoint.tensors["a"].num_elements == 64
    for name, expected in values.items():
        found = checkpoint.values(name)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, expected)


def test_raw_data_is_read_only_and_values_are_a_copy(tiny_gguf: Path) -> None:
    checkpoint = open_checkpoint(tiny_gguf)
    name = next(iter(checkpoint.tensors))

    assert not checkpoint.data(name).flags.writeable
    assert checkpoint.values(name).flags.writeable


def test_sha256_is_that_of_the_file(tiny_gguf: Path) -> None:
    assert open_checkpoint(tiny_gguf).sha256() == hashlib.sha256(tiny_gguf.read_bytes()).hexdigest()


def test_a_closed_checkpoint_says_so_and_what_was_read_lives_on(tiny_gguf: Path) -> None:
    with open_checkpoint(tiny_gguf) as checkpoint:
        name = next(iter(checkpoint.tensors))
        held, expected = checkpoint.data(name), checkpoint.data(name).copy()
        architecture = checkpoint.architecture

    np.testing.assert_array_equal(held, expected)
    assert checkpoint.architecture == architecture
    with pytest.raises(CheckpointError, match="is closed"):
        checkpoint.data(name)
    with pytest.raises(CheckpointError, match="is closed"):
        checkpoint.metadata["tokenizer.ggml.tokens"]


def test_an_unknown_tensor_name_is_a_lookup_error(tiny_gguf: Path) -> None:
    with pytest.raises(LookupError, match=r"llama.gguf has no tensor 'nope'"):
        open_checkpoint(tiny_gguf).data("nope")


def test_a_type_without_a_decoder_opens_and_is_refused_when_its_values_are_needed(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_bytes([ARCHITECTURE], [tensor("a", [256], 15)], b"\0" * 292))
    checkpoint = open_checkpoint(path)

    assert checkpoint.data("a").nbytes == 292
    with pytest.raises(UnsupportedFeatureError, match="Q8_K has no decoder; decodable are"):
        checkpoint.values("a")


@pytest.mark.parametrize("value", [None, key("general.architecture", U32, b"\0\0\0\0")])
def test_a_missing_or_wrong_architecture_is_said(tmp_path: Path, value: bytes | None) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_bytes([value] if value else []))

    with pytest.raises(GGUFError, match=r"general.architecture is (None|0), but must name the architecture"):
        _ = open_checkpoint(path).architecture


@pytest.mark.model
def test_the_default_model_decodes_in_bounded_memory(smollm2: Path) -> None:
    checkpoint = open_checkpoint(smollm2)
    largest = max(checkpoint.tensors.values(), key=lambda info: info.num_elements)
    tracemalloc.start()
    began = time.process_time()
    values = checkpoint.values(largest.name)
    elapsed_s, peak_bytes = time.process_time() - began, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert values.shape == largest.shape
    assert np.isfinite(values).all()
    assert peak_bytes < values.nbytes + largest.num_bytes + 4_000_000
    assert elapsed_s < 5


# -- what is no checkpoint --------------------------------------------------------------------------------------------

FOREIGN = {
    "an empty file": (b"", r"is empty \(0 bytes\)"),
    "an LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer: run `git lfs"),
    "a zip": (b"PK\x03\x04" + b"\0" * 60, "zip archive"),
    "a gzip": (b"\x1f\x8b\x08" + b"\0" * 60, "gzip archive"),
    "a web page": (b"\n<!DOCTYPE html><html>Not found</html>", "web page"),
    "safetensors": ((300).to_bytes(8, "little") + b'{"a":{"dtype":"F32"}}', "safetensors file"),
    "JSON": (b'{"error": "no such model"}', "looks like JSON"),
    "zeros": (b"\0" * 4096, "zeros only"),
    "old ggml": (b"tjgg" + b"\3\0\0\0", "before GGUF"),
    "a pickle": (b"\x80\x02}q\x00", "pickle"),
    "big-endian magic": (b"FUGG" + b"\0" * 20, "big-endian"),
    "a text": (b"hello world, this is no model", r"starts with 'hell' instead of 'GGUF'"),
    "two bytes": (b"GG", r"starts with 'GG' instead"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_of_another_kind_is_called_by_its_kind(tmp_path: Path, name: str) -> None:
    content, message = FOREIGN[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)

    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    assert str(caught.value).startswith("model.gguf is ")


def test_a_directory_is_refused_with_the_files_in_it(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is a directory; and there is no .gguf file in it"):
        open_checkpoint(tmp_path)
    (tmp_path / "a.gguf").touch()
    with pytest.raises(CheckpointError, match=r"is a directory; give one of its files: a.gguf") as caught:
        open_checkpoint(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path} is")


@pytest.mark.parametrize("name", ["absent.gguf", "x" * 4000 + ".gguf", "nul\0.gguf"])
def test_what_is_not_there_is_one_sentence(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=r"no such file|cannot open"):
        open_checkpoint(tmp_path / name)


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_checkpoint(tmp_path / "pipe.gguf")


def test_a_file_that_may_not_be_read_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_checkpoint(tmp_path / "x.gguf", {})

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CheckpointError, match=r"cannot open x.gguf: permission denied"):
        open_checkpoint(path)


# -- split sets (B111, B112) ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [0, 1, 2])
def test_any_shard_opens_the_whole_set(tmp_path: Path, given: int) -> None:
    paths = write_shards(tmp_path)
    checkpoint = open_checkpoint(paths[given])

    assert checkpoint.path == paths[0]
    assert checkpoint.files == tuple(paths)
    assert list(checkpoint.tensors) == [f"blk.{i}.attn_norm.weight" for i in range(3)]
    assert checkpoint.values("blk.2.attn_norm.weight").tolist() == [2.0] * 32
    assert checkpoint.num_bytes == sum(path.stat().st_size for path in paths)


def test_sha256_of_a_split_set_covers_every_file(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    before = open_checkpoint(paths[0]).sha256()
    paths[2].write_bytes(paths[2].read_bytes() + b"x")

    assert open_checkpoint(paths[0]).sha256() != before


def test_missing_siblings_are_listed_by_name(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    paths[0].unlink()
    paths[2].unlink()

    with pytest.raises(CheckpointError, match=r"model-00001-of-00003.gguf, model-00003-of-00003.gguf; fetch them"):
        open_checkpoint(paths[1])


def test_a_huge_shard_count_in_a_name_lists_only_the_first(tmp_path: Path) -> None:
    path = write_shards(tmp_path, 1)[0].rename(tmp_path / "m-00001-of-99999.gguf")

    with pytest.raises(CheckpointError, match=r"m-00006-of-99999.gguf and 99993 more"):
        open_checkpoint(path)


def test_a_shard_under_another_name_cannot_find_its_siblings(tmp_path: Path) -> None:
    path = write_shards(tmp_path)[1].rename(tmp_path / "renamed.gguf")

    with pytest.raises(CheckpointError, match=r"renamed.gguf says split.count=3, but its siblings cannot be found"):
        open_checkpoint(path)


def test_a_wrong_split_count_is_said(tmp_path: Path) -> None:
    one, *_ = write_shards(tmp_path, 3)
    (tmp_path / "b").mkdir()
    for index in range(2):
        shutil.copy(one, tmp_path / "b" / f"model-{index + 1:05d}-of-00002.gguf")

    with pytest.raises(CheckpointError, match=r"split.count is 3, but the name says 2 shards"):
        open_checkpoint(tmp_path / "b" / "model-00001-of-00002.gguf")


def test_swapped_shards_are_said(tmp_path: Path) -> None:
    one, two, _ = write_shards(tmp_path, 3)
    one.rename(tmp_path / "aside")
    two.rename(one)
    (tmp_path / "aside").rename(two)

    with pytest.raises(CheckpointError, match=r"00001-of-00003.gguf: split.no is 1, but by its name it must be 0"):
        open_checkpoint(two)


def test_a_wrong_total_of_tensors_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"split.tensors.count is 7, but the 3 shards hold 3 tensors"):
        open_checkpoint(write_shards(tmp_path, said_tensors=7)[0])


def test_a_tensor_that_two_shards_hold_is_said(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match=r"model-00002-of-00003.gguf: tensor 'blk.0.*' is in model-00001-of-00003.gguf"):
        open_checkpoint(write_shards(tmp_path, same_name=True)[0])


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    paths[1].write_bytes(paths[1].read_bytes()[:-40])

    with pytest.raises(GGUFError, match=r"model-00002-of-00003.gguf"):
        open_checkpoint(paths[0])


def test_shard_numbers_that_cannot_exist_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="shard 4 of 3 cannot exist"):
        open_checkpoint(tmp_path / "m-00004-of-00003.gguf")


def test_a_name_without_the_pattern_is_alone() -> None:
    assert shard_paths(Path("a-1-of-2.gguf")) == (Path("a-1-of-2.gguf"),)
