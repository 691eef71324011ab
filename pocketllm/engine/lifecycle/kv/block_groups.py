"""Which blocks a request has: of layers that keep every token, and of layers that see a window; pure.

Each kind has a pool of its own and the same accounting. Of a window's blocks a request gives back those that nothing
it computes will look at again: so it has no more of them than the window and the longest step take, however long it
is. What is given back stays findable by its key until its room is needed, as any block does.
"""

from collections.abc import Iterable

from pocketllm.engine.lifecycle.kv.block_pool import BlockPool, blocks_for
from pocketllm.engine.lifecycle.request import Request
from pocketllm.engine.plan import Limits


class BlockGroup:
    """Blocks of layers that keep every token."""

    def __init__(self, num_blocks: int, limits: Limits) -> None:
        self.pool = BlockPool(num_blocks)
        self._block_size = limits.block_size
        self._reserve = limits.reserve
        self._watermark_blocks = int(limits.watermark * num_blocks)
        self._most = num_blocks

    def ids(self, request: Request) -> list[int]:
        """The blocks a request has, in order."""
        return request.block_ids

    def num_gone(self, request: Request) -> int:
        """How many before those it has given back."""
        return 0

    def num_missing(self, request: Request, num_tokens: int) -> int:
        """How many more it takes to compute its tokens up to so many, at once."""
        return max(blocks_for(num_tokens, self._block_size) - self.num_gone(request) - len(self.ids(request)), 0)

    def num_coming(self, request: Request, num_tokens: int) -> int:
        """The same for tokens that it computes step by step, as it gives blocks back meanwhile."""
        return min(self.num_missing(request, num_tokens), max(self._most - len(self.ids(request)), 0))

    def has_room(self, request: Request, num_tokens: int) -> bool:
        """Whether it could get them now."""
        return self.num_missing(request, num_tokens) <= self.pool.num_free

    def take(self, request: Request, num_tokens: int) -> None:
        """Give it those; the caller has checked `has_room`."""
        self.ids(request).extend(self.pool.allocate(self.num_missing(request, num_tokens)))

    def can_admit(self, requests: Iterable[Request]) -> bool:
        """Whether these may run together, by all that they are known to need and `reserve` of what they may need."""
        certain, possible = 0, 0
        for request in requests:
            # tokens it has now, one more than is computed before the next draw
            known = self.num_coming(request, request.num_tokens + request.num_pending_tokens)
            certain += known
            possible += max(self.num_coming(request, request.max_computed_tokens) - known, 0)
        needed = certain + int(self._reserve * possible + 0.999999)
        return needed <= self.pool.num_free - self._watermark_blocks

    def release(self, request: Request) -> None:
        """Take all its blocks back."""
        self.pool.free(self.ids(request))
        self.ids(request).clear()


class WindowGroup(BlockGroup):
    """Blocks of layers that see a window: `request.num_gone_blocks` of a request's first ones are not held any more."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits.num_window_blocks, limits)
        self._window = limits.window
        self._most = limits.window_blocks_per_request

    def ids(self, request: Request) -> list[int]:
        return request.window_block_ids

    def num_gone(self, request: Request) -> int:
        return request.num_gone_blocks

    def first_seen(self, num_computed_tokens: int) -> int:
        """The first block that the tokens after so many look at."""
        return max(num_computed_tokens - self._window + 1, 0) // self._block_size

    def give_back(self, request: Request) -> None:
        """Free what nothing it computes will look at again; called when a step has been booked."""
        num_gone = min(self.first_seen(request.num_computed_tokens) - request.num_gone_blocks, len(self.ids(request)))
        self.pool.free(request.window_block_ids[:num_gone])
        del request.window_block_ids[:num_gone]
        request.num_gone_blocks += num_gone

    def can_resume(self, keys: list[bytes], num_blocks: int) -> bool:
        """Whether a request whose first blocks have these keys can go on behind so many of them."""
        first = self.first_seen(num_blocks * self._block_size)
        return all(self.pool.find(key) is not None for key in keys[first:num_blocks])

    def resume(self, request: Request, num_blocks: int) -> None:
        """Give it what it looks at behind so many blocks; the caller has checked `can_resume`."""
        request.num_gone_blocks = self.first_seen(num_blocks * self._block_size)
        keys = request.block_keys[request.num_gone_blocks : num_blocks]
        found = [block for block in map(self.pool.find, keys) if block is not None]
        self.pool.share(found)
        request.window_block_ids = found

    def keep(self, request: Request, index: int, key: bytes) -> None:
        """Let its block of that number be found by its key."""
        self.pool.set_key(request.window_block_ids[index - request.num_gone_blocks], key)

    def forget(self, request: Request) -> None:
        """Let nothing be found again that may be of this request."""
        found = map(self.pool.find, request.block_keys)
        self.pool.forget([block for block in found if block is not None])

    def release(self, request: Request) -> None:
        super().release(request)
        request.num_gone_blocks = 0
