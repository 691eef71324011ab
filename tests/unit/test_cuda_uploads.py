"""Bytes on their way to a GPU: the pieces are the whole, and one is copied while another is used."""

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pocketllm.engine.backends.cuda.matrices import load_plain, uploads
from pocketllm.engine.backends.cuda.matrices.uploads import Piece, pieces

CPU = torch.device("cpu")


@pytest.mark.parametrize(("count", "step"), [(1, 1), (7, 3), (9, 3), (5, 8), (64, 1)])
def test_pieces_put_together_are_the_file_s_bytes(count: int, step: int) -> None:
    rows = np.random.default_rng(count).integers(0, 256, (count, 3, 11), dtype=np.uint8)

    got = list(pieces(rows, step, CPU))

    assert [len(piece) for piece in got[:-1]] == [step] * (len(got) - 1)
    assert np.array_equal(torch.cat(got).numpy(), rows)


def test_the_next_piece_is_being_copied_while_one_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    copied = uploads.being_copied

    def counted(rows: npt.NDArray[np.uint8], device: torch.device) -> Piece:
        begun.append(len(rows))
        return copied(rows, device)

    monkeypatch.setattr(uploads, "being_copied", counted)

    coming = pieces(np.zeros((4, 8), np.uint8), 1, CPU)

    assert [(next(coming), len(begun))[1] for _ in range(4)] == [2, 3, 4, 4]


def test_a_piece_is_not_the_file_s_own_memory() -> None:
    rows = np.zeros((2, 8), np.uint8)

    got = list(pieces(rows, 1, CPU))
    rows[:] = 1

    assert not torch.cat(got).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_plain_floats_are_loaded_as_they_lie_in_the_file(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pocketllm.engine.backends.cuda.matrices.ELEMENTS_AT_ONCE", 13)
    values = torch.randn(9, 5).to(dtype)
    data = values.view(torch.uint8).numpy().reshape(-1)

    assert torch.equal(load_plain(data, dtype, (9, 5), CPU), values)
