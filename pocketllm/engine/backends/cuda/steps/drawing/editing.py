"""Logits with what the host changes: it says everything in one array of words, which goes up in one copy."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
from torch import Tensor

from pocketllm.engine.backends.api.drawing import Draw
from pocketllm.engine.backends.cuda.steps.drawing.kernels.edit import allow_kernel, edit_kernel

CHUNK = 2048
"""Logits that one program copies."""
EDITED_AT_ONCE = 256
WORD_BITS = 32
Words = npt.NDArray[np.int32]


class Room:
    """Memory for words that stays where it is until more are needed than ever before."""

    def __init__(self, device: torch.device, is_pinned: bool = False) -> None:
        self._how: dict[str, Any] = {"device": device, "pin_memory": is_pinned}
        self._words = torch.empty(0, dtype=torch.int32, device=device)

    def of(self, count: int) -> Tensor:
        """So many; what is in them is what the last call's user left, or anything."""
        if count > len(self._words):
            self._words = torch.empty(triton.next_power_of_2(count), dtype=torch.int32, **self._how)
        return self._words[:count]


class Editor:
    """Writes changed copies of logits, one after another into the same memory."""

    def __init__(self, device: torch.device) -> None:
        self._words, self._edited = Room(device), Room(device)

    def edited(self, logits: Tensor, draws: Sequence[Draw], host: Room) -> Tensor:
        """The logits themselves where nothing is changed. host: whose words the device reads later on."""
        if all(draw.allowed is None and not draw.edits for draw in draws):
            return logits
        rows, vocab = logits.shape
        parts, rounds = said(draws, rows, vocab)
        count = sum(map(len, parts))
        sent = host.of(count)
        np.concatenate(parts, out=sent.numpy())
        words = self._words.of(count)
        words.copy_(sent, non_blocking=True)
        edited = self._edited.of(rows * vocab).view(torch.float32).view(rows, vocab)
        allow_kernel[rows, triton.cdiv(vocab, CHUNK)](
            logits, words, edited, vocab, logits.stride(0), CHUNK=CHUNK, num_warps=8
        )
        first = count - 3 * sum(rounds)
        for length in filter(None, rounds):
            grid = (triton.cdiv(length, EDITED_AT_ONCE),)
            edit_kernel[grid](edited, words, first, length, BLOCK=EDITED_AT_ONCE, num_warps=2)
            first += 3 * length
        return edited


def said(draws: Sequence[Draw], rows: int, vocab: int) -> tuple[list[Words], list[int]]:
    """What the kernels are told, in parts that follow one another, and how many logits change in each round.

    Of each row where its bits of allowed tokens begin, or -1; the bits; then of each round, which has at most one edit
    of every row, places among all logits, values and whether they divide.
    """
    begins, parts, at = np.full(rows, -1, np.int32), list[Words](), rows
    parts.append(begins)
    for draw in draws:
        if draw.allowed is not None:
            begins[draw.row] = at
            parts.append(bits_of(draw.allowed, vocab))
            at += len(parts[-1])
    rounds = []
    for number in range(max(len(draw.edits) for draw in draws)):
        now = [(draw.row, draw.edits[number]) for draw in draws if len(draw.edits) > number]
        lengths = [len(edit.ids) for _, edit in now]
        parts.append(np.concatenate([(row * vocab + edit.ids).astype(np.int32) for row, edit in now]))
        parts.append(np.concatenate([edit.values for _, edit in now]).astype(np.float32).view(np.int32))
        parts.append(np.repeat([edit.divides for _, edit in now], lengths).astype(np.int32))
        rounds.append(sum(lengths))
    return parts, rounds


def bits_of(allowed: npt.NDArray[np.bool_], vocab: int) -> Words:
    """A mask of the vocabulary's length, a bit for each token; what it does not name is forbidden."""
    words = np.zeros(-(-vocab // WORD_BITS), np.int32)
    bits = np.packbits(allowed[:vocab], bitorder="little")
    words.view(np.uint8)[: len(bits)] = bits
    return words
