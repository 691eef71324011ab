"""Finds cache blocks that an earlier request has filled with the same tokens; pure.

A full block is known by a chained key: a digest of the key before it and of its own tokens, so that equal keys mean
equal tokens from the first one on. The chain begins with what else decides a block's contents: the model, the cache's
geometry and a request's salt. Only full blocks are shared, and a shared block is never written.
"""

from array import array
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

from pocketllm.engine.lifecycle.kv.block_groups import WindowGroup
from pocketllm.engine.lifecycle.kv.block_pool import BlockPool
from pocketllm.engine.lifecycle.kv.prompt_ends import PromptEnds
from pocketllm.engine.lifecycle.kv.state_slots import StateSlots
from pocketllm.engine.lifecycle.request import Request

KEY_BYTES = 16


class PrefixCache:
    """The blocks of a pool by the tokens they hold.

    seed: tells apart what may not share blocks (model, block size, dtype and layers of the cache); states and ends: of
    a model that has recurrent states; windows: of one with layers that see a window; answers_apart: whether tokens of
    answers are not found again, since they have other bits in a prompt. Counts are in tokens and of admissions only:
    what was asked for, and how much of it was there.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        seed: bytes,
        states: StateSlots | None = None,
        ends: PromptEnds | None = None,
        windows: WindowGroup | None = None,
        answers_apart: bool = False,
    ) -> None:
        self._answers_apart = answers_apart
        self._pool = pool
        self._windows = windows
        self._states = states
        self.ends = ends
        self._block_size = block_size
        self._seed = seed
        self._num_resets = 0
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def match(self, request: Request) -> list[int]:
        """Blocks that hold the request's first tokens, as many as there are without a gap; not taken yet.

        The last token is never among them, because its logits are wanted; a request that wants logits of its whole
        prompt matches nothing.
        """
        blocks: list[int] = []
        if request.is_scored:
            return blocks
        for index in range((request.num_tokens - 1) // self._block_size):
            block = self._pool.find(self._key(request, index))
            if block is None:
                break
            blocks.append(block)
        request.num_known_tokens = len(blocks) * self._block_size
        while blocks and not self._can_resume(request.block_keys, len(blocks)):
            blocks.pop()
        return blocks

    def _can_resume(self, keys: list[bytes], num_blocks: int) -> bool:
        """Whether states and windows are there too, behind the first blocks of these keys."""
        # a state cannot be cut: what follows the last snapshot is computed again
        if self._states is not None and not self._states.can_restore(keys[num_blocks - 1]):
            return False
        return self._windows is None or self._windows.can_resume(keys, num_blocks)

    def take_end(self, request: Request) -> tuple[bytes, Any] | None:
        """Give a request all that an equal prompt has left, so that nothing of it is computed.

        Returns the key of its state and the logits behind its prompt; None where something of it is not there.
        """
        if self.ends is None or request.is_scored or request.output_token_ids:
            return None
        key = self._end_key(request)
        logits = self.ends.find(request, key)
        num_full = len(request.prompt_token_ids) // self._block_size
        blocks = [self._pool.find(self._key(request, index)) for index in range(num_full)]
        found = [block for block in blocks if block is not None]
        if logits is None or len(found) < num_full or not self.ends.take(request, key, found):
            return None
        request.num_kept_blocks = num_full
        request.num_computed_tokens = len(request.prompt_token_ids)
        return key, logits

    def keep_end(self, request: Request, logits: Any) -> None:
        """Keep what a request leaves that has computed its prompt and drawn nothing yet."""
        if self.ends is not None and not request.output_token_ids:
            self.ends.keep(request, self._end_key(request), logits)

    def is_worth_waiting(self, request: Request, running: Iterable[Request]) -> bool:
        """Whether a running request is about to compute half or more of what the request, with its blocks, still needs.

        So n answers to one prompt, submitted together, cost one prefill.
        """
        if request.is_scored:
            return False
        missing = request.num_tokens - request.num_computed_tokens
        return any(2 * self._num_coming(request, other) >= missing for other in running)

    def _num_coming(self, request: Request, other: Request) -> int:
        first = index = len(request.block_ids)
        if first < other.num_kept_blocks:
            return 0  # it has been computed, and would have been found if it were the same
        last = min(request.num_tokens - 1, self._num_to_find(other)) // self._block_size
        while index < last and self._key(request, index) == self._key(other, index):
            index += 1
        return (index - first) * self._block_size

    def _num_to_find(self, request: Request) -> int:
        """How many of its tokens others may find, once they have been computed."""
        return len(request.prompt_token_ids) if self._answers_apart else request.num_tokens

    def count(self, request: Request, num_hit_tokens: int) -> None:
        """Book an admission."""
        self.num_queried_tokens += request.num_tokens
        self.num_hit_tokens += num_hit_tokens

    def keep(self, request: Request) -> None:
        """Make the blocks that a request has filled findable; called when their tokens have been computed."""
        computed = min(request.num_computed_tokens, self._num_to_find(request))
        for index in range(request.num_kept_blocks, computed // self._block_size):
            self._pool.set_key(request.block_ids[index], self._key(request, index))
            if self._windows is not None:
                self._windows.keep(request, index, self._key(request, index))
            request.num_kept_blocks = index + 1
        num_blocks, rest = divmod(request.num_computed_tokens, self._block_size)
        if self._states is not None and num_blocks and not rest:
            self._states.save(request, self._key(request, num_blocks - 1))

    def step_end(self, request: Request, end: int) -> int:
        """Where a step that would compute a request's tokens up to `end` stops instead, so that its state can be kept.

        Where it leaves what an earlier request has computed, which others may share as well; else at the end of a
        block, if it comes to one, and before the last token, so that a repeated prompt has one to begin with. A model
        without recurrent states stops nowhere.
        """
        if self._states is None:
            return end
        if request.num_computed_tokens < request.num_known_tokens < end:
            return request.num_known_tokens
        last = min(end, request.num_tokens - 1) // self._block_size * self._block_size
        return last if last > request.num_computed_tokens else end

    def reset(self) -> None:
        """Begin anew: nothing that was computed until now is found by any request that comes."""
        self._pool.forget_all()
        if self._states is not None:
            self._states.pool.forget_all()
        if self.ends is not None:
            self.ends.forget_all()
        if self._windows is not None:
            self._windows.pool.forget_all()
        # what runs goes on filling blocks: their keys continue a chain that no new request begins
        self._num_resets += 1

    def _key(self, request: Request, index: int) -> bytes:
        keys = request.block_keys
        while len(keys) <= index:
            start = len(keys) * self._block_size
            tokens = array("i", request.token_ids(start, start + self._block_size))
            parent = keys[-1] if keys else self._root(request.cache_salt)
            keys.append(blake2b(parent + tokens.tobytes(), digest_size=KEY_BYTES).digest())
        return keys[index]

    def _end_key(self, request: Request) -> bytes:
        """Of a whole prompt; no key of a block, whatever its length."""
        num_full, _ = divmod(len(request.prompt_token_ids), self._block_size)
        parent = self._key(request, num_full - 1) if num_full else self._root(request.cache_salt)
        rest = array("i", request.token_ids(num_full * self._block_size, len(request.prompt_token_ids)))
        return blake2b(parent + rest.tobytes() + b"end", digest_size=KEY_BYTES).digest()

    def _root(self, salt: str | None) -> bytes:
        text = repr((self._seed, self._block_size, self._num_resets, salt))
        return blake2b(text.encode(), digest_size=KEY_BYTES).digest()
