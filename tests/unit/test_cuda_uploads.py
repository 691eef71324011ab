"""Bytes on their way to a GPU: the pieces are the whole, in order, and the next are read while one is used."""

import threading
import time
import weakref
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pocketllm.engine.backends.cuda import matrices
from pocketllm.engine.backends.cuda.matrices import Matrix, Packed, uploads
from pocketllm.engine.backends.cuda.matrices.uploads import Array, Uploads, spans
from pocketllm.engine.backends.cuda.packing import unpack
from pocketllm.engine.weights import quant
from pocketllm.engine.weights.checkpoint import open_checkpoint
from pocketllm.engine.weights.tensor_file import Stored, TensorFile
from pocketllm.errors import CheckpointError
from tests.gguf_files import write_checkpoint

CPU = torch.device("cpu")


def q8_0(rows: int, cols: int) -> npt.NDArray[np.uint8]:
    data = np.random.default_rng(rows).integers(0, 256, (rows, cols // 32, 34), dtype=np.uint8)
    data[..., :2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    return data.reshape(-1)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Two matrices, [40, 64], one after another."""
    path = tmp_path / "weights"
    path.write_bytes(np.concatenate([q8_0(40, 64), q8_0(40, 64)[::-1]]).tobytes())
    return path


def stored(file: TensorFile, number: int) -> Stored:
    return Stored(file, f"matrix {number}", number * 40 * 68, 40 * 68)


def values_of(matrix: Matrix) -> npt.NDArray[np.float32]:
    assert isinstance(matrix.held, Packed)
    return unpack(matrix.held).numpy()


@pytest.mark.parametrize(("count", "most"), [(1, 1), (7, 3), (9, 4), (5, 8), (64, 1), (3, 0)])
def test_spans_cover_all_once_and_none_is_longer_than_asked(count: int, most: int) -> None:
    parts = spans(count, most)

    assert [number for first, last in parts for number in range(first, last)] == list(range(count))
    assert max(last - first for first, last in parts) <= max(1, most)


def test_pieces_are_used_in_order_whichever_was_read_first() -> None:
    data, used, coming = np.arange(200, dtype=np.uint8), [], Uploads(CPU)
    for first in range(0, 200, 10):
        coming.add(Array(data), first, 10, lambda memory: used.append(memory.clone()))
    before = len(used)

    coming.finish()

    assert before == 20 - uploads.AHEAD >= 0  # the others were still being read
    assert torch.cat(used).numpy().tolist() == data.tolist()


def test_a_matrix_that_is_asked_for_early_is_whole(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "PIECE_BYTES", 16 * 68)
    coming, opened = Uploads(CPU), TensorFile(file)
    loaded = [matrices.load(stored(opened, number), "Q8_0", (40, 64), coming) for number in (1, 0)]

    got = [values_of(matrix) for matrix in loaded]

    data = np.frombuffer(file.read_bytes(), np.uint8).reshape(2, -1)
    for matrix, want in zip(got, data[::-1], strict=True):
        assert np.array_equal(matrix, quant.dequantize(want, "Q8_0", (40, 64)), equal_nan=True)


def test_experts_in_a_file_are_as_those_in_memory(file: Path) -> None:
    opened = TensorFile(file)
    for shape in ((2, 20, 64), (2, 16, 64)):  # the first are filled up to whole tiles
        count = shape[0] * shape[1] * 68
        data = np.frombuffer(file.read_bytes(), np.uint8)[:count]
        want = matrices.load_experts(data, "Q8_0", shape, CPU).packed
        got = matrices.load_experts(Stored(opened, "experts", 0, count), "Q8_0", shape, Uploads(CPU)).packed

        assert torch.equal(got.words, want.words)
        assert torch.equal(got.scales.view(torch.int16), want.scales.view(torch.int16))


def test_an_array_may_be_changed_once_it_was_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = Array.read_into

    def late(self: Array, memory: npt.NDArray[np.uint8], first: int) -> None:
        time.sleep(0.05)
        sound(self, memory, first)

    monkeypatch.setattr(Array, "read_into", late)
    data, coming = q8_0(40, 64), Uploads(CPU)
    want = quant.dequantize(data.copy(), "Q8_0", (40, 64))

    matrix = matrices.load(data, "Q8_0", (40, 64), coming)
    data[:] = 0

    assert np.array_equal(values_of(matrix), want)


@pytest.mark.parametrize("quant_type", ["Q8_0", "F32"])
def test_as_much_memory_is_taken_as_pieces_are_ahead_however_large_a_matrix(
    quant_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "PIECE_BYTES", 16 * 68)
    rows, cols = (1600, 64) if quant_type == "Q8_0" else (1700, 16)
    (tmp_path / "weights").write_bytes(bytes(1600 * 68))
    alive, most, lock, make = 0, 0, threading.Lock(), uploads.new_memory

    def change(by: int) -> None:
        nonlocal alive, most
        with lock:
            alive += by
            most = max(most, alive)

    def counted(count: int, is_pinned: bool) -> torch.Tensor:
        memory = make(count, is_pinned)
        change(1)
        weakref.finalize(memory, change, -1)
        return memory

    monkeypatch.setattr(uploads, "new_memory", counted)
    source = Stored(TensorFile(tmp_path / "weights"), "large", 0, 1600 * 68)

    for given in (source, np.zeros(1600 * 68, np.uint8)):
        assert matrices.load(given, quant_type, (rows, cols), Uploads(CPU)).held.rows == rows

        # one is being used; a thread may still hold the last that it read; pieces are 100
        assert most <= uploads.AHEAD + 1 + uploads.READERS


def test_an_array_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot reshape"):
        matrices.load(q8_0(41, 64), "Q8_0", (40, 64), CPU)


def test_a_file_that_is_cut_short_ends_the_load_and_leaves_nothing_for_the_next(file: Path) -> None:
    coming, opened = Uploads(CPU), TensorFile(file)
    data = file.read_bytes()
    file.write_bytes(data[: len(data) * 3 // 4])
    cut = [matrices.load(stored(opened, number), "Q8_0", (40, 64), coming) for number in (0, 1, 1)]

    with pytest.raises(CheckpointError, match="weights was changed while it was being loaded: 'matrix 1' needs bytes"):
        coming.finish()

    coming.finish()
    assert values_of(matrices.load(q8_0(40, 64), "Q8_0", (40, 64), coming)).shape == (40, 64)
    for matrix in cut:
        with pytest.raises(RuntimeError, match="the load that this matrix was part of has failed"):
            _ = matrix.held


def test_a_checkpoint_hands_out_bytes_that_are_still_in_its_file(tmp_path: Path) -> None:
    values = {"t": np.arange(12, dtype=np.float32).reshape(3, 4)}
    with open_checkpoint(write_checkpoint(tmp_path / "t.gguf", values, general__architecture="llama")) as checkpoint:
        found = checkpoint.stored("t")
        assert found is not None
        memory = np.empty(8, np.uint8)
        found.read_into(memory, 4)

    assert memory.view(np.float32).tolist() == [1.0, 2.0]
    with pytest.raises(CheckpointError, match=r"t\.gguf is closed: open the checkpoint again to read 't'"):
        found.read_into(memory, 4)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_plain_floats_are_loaded_as_they_lie_in_the_file(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "PIECE_BYTES", 26)
    values = torch.randn(9, 5).to(matrices.PLAIN[dtype])
    data = values.view(torch.uint8).numpy().reshape(-1)

    held = matrices.load(data, dtype, (9, 5), CPU).held

    assert isinstance(held, matrices.Plain)
    assert torch.equal(held.values, values)
