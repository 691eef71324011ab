"""Where running requests keep their recurrent state, and snapshots of states that may be wanted again; pure.

A state has one size however long its sequence is, and it cannot be cut: what a prompt's first blocks left in it is
found again only where it was copied then. So the slots are a pool of blocks like any other, one block a state: a
running request uses one; a snapshot is one that nobody uses, known by the key of the tokens behind it, the longest idle
evicted first. Copies are decided here and made at the beginning of the next step, in the order of the decisions.
"""

from pocketllm.engine.lifecycle.kv.block_pool import BlockPool
from pocketllm.engine.lifecycle.request import Request

Copy = tuple[int, int]
"""From a slot to a slot."""


class StateSlots:
    """num_slots: of running requests and snapshots together, at least as many as there may be running requests."""

    def __init__(self, num_slots: int) -> None:
        self.pool = BlockPool(num_slots)
        self._copies: list[Copy] = []

    def open(self, request: Request, key: bytes | None) -> None:
        """Give a request a slot, with the state that `key` stands for in it; None: it begins, and needs none."""
        source = None if key is None else self.pool.find(key)
        assert key is None or source is not None, f"no snapshot for {request.request_id}"
        if source is not None:
            self.pool.share([source])  # or its room could be what the request is given
        [request.state_slot] = self.pool.allocate(1)
        if source is not None:
            self._copies.append((source, request.state_slot))
            self.pool.free([source])

    def close(self, request: Request) -> None:
        """Take a request's slot back, if it has one."""
        if request.state_slot is not None:
            self.pool.free([request.state_slot])
            request.state_slot = None

    def can_restore(self, key: bytes) -> bool:
        """Whether there is a snapshot for `key`, and room for a request beside it."""
        source = self.pool.find(key)
        return source is not None and self.pool.num_free > 1

    def save(self, request: Request, key: bytes) -> None:
        """Keep a copy of a request's state, whose tokens `key` stands for, as long as there is room.

        Of a request's answer the latest alone: a conversation goes on from its end.
        """
        assert request.state_slot is not None, request.request_id
        is_answer = request.num_computed_tokens > len(request.prompt_token_ids)
        if is_answer and request.answer_key is not None:
            self._drop(request.answer_key)
        if self.pool.find(key) is None and self.pool.num_free:
            [slot] = self.pool.allocate(1)
            self._copies.append((request.state_slot, slot))
            self.pool.set_key(slot, key)
            self.pool.free([slot])
        if is_answer:
            request.answer_key = key

    def _drop(self, key: bytes) -> None:
        slot = self.pool.find(key)
        if slot is not None:
            self.pool.forget([slot])

    def take_copies(self) -> tuple[Copy, ...]:
        """What the next step has to copy before it computes."""
        copies, self._copies = tuple(self._copies), []
        return copies
