"""Ends of prompts, kept so that an equal prompt computes nothing; pure.

Beside its full blocks a repeated prompt needs its last, half-filled block, the recurrent state behind its last token
and the logits there. Block and state are copies, known by one key in the two pools and evicted like anything else in
them; of logits the latest are kept, `most` of them.
"""

from collections import OrderedDict
from typing import Any

from pocketllm.engine.lifecycle.kv.block_pool import BlockPool
from pocketllm.engine.lifecycle.kv.state_slots import Copy, StateSlots
from pocketllm.engine.lifecycle.request import Request


class PromptEnds:
    """What belongs to the ends of prompts in a pool of blocks and in one of states."""

    def __init__(self, pool: BlockPool, states: StateSlots, block_size: int, most: int) -> None:
        self._pool = pool
        self._states = states
        self._block_size = block_size
        self._most = most
        self._logits: OrderedDict[bytes, Any] = OrderedDict()
        self._copies: list[Copy] = []

    def keep(self, request: Request, key: bytes, logits: Any) -> None:
        """Copy what a request that has just computed its prompt leaves, as long as there is room. logits: [vocab]."""
        if self._has_tail(request) and not self._keep_tail(request.block_ids[-1], key):
            return
        self._states.save(request, key)
        if key not in self._logits:
            self._logits[key] = logits.copy()
            while len(self._logits) > self._most:
                self._logits.popitem(last=False)

    def _keep_tail(self, block: int, key: bytes) -> bool:
        """Have a last block copied, unless it was; False when there is no room."""
        known = self._pool.find(key)
        if known is not None:
            if key in self._logits:
                return True
            self._pool.forget([known])  # the step that was to copy into it may have failed
        if not self._pool.num_free:
            return False
        [copy] = self._pool.allocate(1)
        self._copies.append((block, copy))
        self._pool.set_key(copy, key)
        self._pool.free([copy])
        return True

    def find(self, request: Request, key: bytes) -> Any | None:
        """Logits behind a request's prompt, when the copies are there as well; None otherwise."""
        is_whole = not self._has_tail(request) or self._pool.find(key) is not None
        return self._logits.get(key) if is_whole and self._states.can_restore(key) else None

    def take(self, request: Request, key: bytes, blocks: list[int]) -> bool:
        """Give a request the full blocks of its prompt, and a block of its own with the last tokens in it.

        False, and nothing happens, when there is no room for that one.
        """
        tail = [block for block in (self._pool.find(key),) if block is not None and self._has_tail(request)]
        self._pool.share([*blocks, *tail])
        if tail and not self._pool.num_free:
            self._pool.free([*blocks, *tail])
            return False
        own = self._pool.allocate(len(tail))
        self._copies += zip(tail, own, strict=True)
        self._pool.free(tail)
        request.block_ids = [*blocks, *own]
        self._logits.move_to_end(key)
        return True

    def _has_tail(self, request: Request) -> bool:
        return len(request.prompt_token_ids) % self._block_size != 0

    def forget_all(self) -> None:
        """Let no end be found again."""
        self._logits.clear()

    def take_copies(self) -> tuple[Copy, ...]:
        """Blocks that the next step has to copy before it computes."""
        copies, self._copies = tuple(self._copies), []
        return copies
