"""A model without weights, for tests of the lifecycle: its logits are a function of all tokens seen through the cache.

A wrong block, slot, position or row changes the answer, so that any slip of the lifecycle shows up as other tokens.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.engine.backends.api.attention import ForwardBatch
from pocketllm.engine.lifecycle.loop import EngineLoop
from pocketllm.engine.lifecycle.scheduler import Scheduler
from pocketllm.engine.lifecycle.steps.runner import Runner
from pocketllm.engine.models.contract import KVSpec
from pocketllm.engine.plan import Limits

VOCAB_SIZE = 97
EOS = 96


def logits_after(token_ids: list[int], vocab_size: int = VOCAB_SIZE) -> npt.NDArray[np.float32]:
    """The fake model's logits after a sequence: pseudo-random, from the whole sequence in order."""
    state = 1
    for token_id in token_ids:
        state = next_state(state, token_id)
    return logits_of(state, vocab_size)


def next_state(state: int, token_id: int) -> int:
    """What a sequence is boiled down to after one token more."""
    return (state * 48271 + token_id + 11) % 2147483647


def logits_of(state: int, vocab_size: int = VOCAB_SIZE) -> npt.NDArray[np.float32]:
    """Logits of such a state."""
    values = (state * (np.arange(vocab_size, dtype=np.int64) * 2654435761 + 12345)) % 1000003
    return (values / 1000003 * 8).astype(np.float32)


@dataclass
class FakeModel:
    """Obeys models.contract.Model; the cache is [slots] of token ids."""

    num_blocks: int
    block_size: int
    vocab_size: int = VOCAB_SIZE
    kv_spec: KVSpec = field(default_factory=lambda: KVSpec(1, 1, 1, 0))
    fail_at: set[int] = field(default_factory=set)
    num_calls: int = 0
    batches: list[ForwardBatch] = field(default_factory=list)

    def new_cache(self) -> npt.NDArray[np.int64]:
        return np.full(self.num_blocks * self.block_size, -1, np.int64)

    def forward(self, batch: ForwardBatch, cache: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        self.num_calls += 1
        self.batches.append(batch)
        if self.num_calls in self.fail_at:
            raise RuntimeError("the fake model was told to fail")
        assert len(set(batch.slot_mapping.tolist())) == batch.num_tokens, "two tokens write one slot"
        cache[batch.slot_mapping] = batch.input_ids
        rows = [self._row(batch, cache, int(row)) for row in batch.logit_rows]
        return np.array(rows, np.float32).reshape(len(rows), self.vocab_size)

    def _row(self, batch: ForwardBatch, cache: npt.NDArray[np.int64], row: int) -> npt.NDArray[np.float32]:
        seq = int(np.searchsorted(batch.query_start_loc, row, side="right")) - 1
        length = int(batch.positions[row]) + 1
        assert length <= batch.seq_lens[seq]
        places = np.arange(length)
        blocks = batch.block_table[seq, places // self.block_size]
        assert (blocks >= 0).all()
        return logits_after(cache[blocks * self.block_size + places % self.block_size].tolist(), self.vocab_size)

    def logits(self, hidden: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return hidden


@dataclass(frozen=True)
class FakeTokenizer:
    """One character a token: id 0 is 'A', and so on; EOS has no text."""

    vocab_size: int = VOCAB_SIZE
    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset({EOS})
    strips_first_space: bool = False

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        return [ord(character) - 65 for character in text]

    def encode_inside(self, text: str) -> list[int]:
        return [one for one in self.encode(text) if 0 <= one < EOS]

    def encode_rendered(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        return "".join(self.token_text(token_id) for token_id in ids)

    def token_bytes(self, token_id: int) -> bytes:
        return self.token_text(token_id).encode()

    def token_text(self, token_id: int) -> str:
        return "" if token_id == EOS else chr(65 + token_id)

    def is_special(self, token_id: int) -> bool:
        return token_id == EOS


def limits(**changes: Any) -> Limits:
    """Small limits, so that tests reach every one of them."""
    values: dict[str, Any] = {
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "prefill_chunk": 8,
        "block_size": 4,
        "num_blocks": 64,
        "watermark": 0.0,
        "reserve": 1.0,
        "max_queued_requests": 1000,
    }
    return Limits(**{**values, **changes})


def fake_loop(
    model: FakeModel | None = None, tokenizer: FakeTokenizer | None = None, **changes: Any
) -> tuple[EngineLoop, Scheduler, FakeModel]:
    """A loop over the fake model, its scheduler for a look inside, and the model."""
    some = limits(**changes)
    model = model or FakeModel(some.num_blocks, some.block_size)
    scheduler = Scheduler(some, model.vocab_size)
    cache = model.new_cache()
    runner = Runner(lambda batch: model.forward(batch, cache), model.logits, some.block_size, lambda x, rows: x[rows])
    return EngineLoop(scheduler, runner, tokenizer or FakeTokenizer()), scheduler, model  # type: ignore[arg-type]  # a fake


def greedy_reference(prompt: list[int], count: int) -> list[int]:
    """What the fake model answers without any lifecycle around it; ends with EOS if that comes."""
    answer: list[int] = []
    while len(answer) < count and EOS not in answer:
        answer.append(int(np.argmax(logits_after(prompt + answer))))
    return answer
