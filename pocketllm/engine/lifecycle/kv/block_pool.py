"""The paged cache's blocks: free, used by requests, or idle with contents that may be wanted again; pure."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """`num_blocks` cache blocks, each free, used by one or more requests, or idle.

    A block that has a key (what it holds) and that nobody uses any more is idle: it is found by its key until its room
    is needed, the longest idle first. An idle block counts as free.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, num_blocks
        self.num_blocks = num_blocks
        # a stack, lowest id on top: recently used blocks are warm in the processor's caches
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # longest idle first
        self._ref_counts = [0] * num_blocks
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._idle)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_keyed(self) -> int:
        """Blocks that can be found by what they hold."""
        return len(self._key_of)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, to be written; the caller has checked `num_free`."""
        assert 0 <= count <= self.num_free, (count, self.num_free)
        taken = [self._empty.pop() if self._empty else self._evict() for _ in range(count)]
        for block in taken:
            self._ref_counts[block] = 1
        return taken

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        return block

    def find(self, key: bytes) -> int | None:
        """The block that holds what `key` stands for, used or idle."""
        return self._block_of.get(key)

    def share(self, blocks: Iterable[int]) -> None:
        """Use blocks that were found, beside whoever uses them already; they are not to be written."""
        for block in blocks:
            assert block in self._key_of, f"block {block} holds nothing that is known"
            self._idle.pop(block, None)
            self._ref_counts[block] += 1

    def set_key(self, block: int, key: bytes) -> None:
        """Say what a used block holds, now that it is full. Does nothing when another block holds the same."""
        assert self._ref_counts[block], f"block {block} is free"
        assert block not in self._key_of, f"block {block} has a key"
        if key not in self._block_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def forget(self, blocks: Iterable[int]) -> None:
        """Let blocks not be found again; whoever uses them goes on using them."""
        for block in blocks:
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._block_of[key]
            if block in self._idle:
                del self._idle[block]
                self._empty.append(block)

    def forget_all(self) -> None:
        """Let no block be found again."""
        self.forget(list(self._key_of))

    def free(self, blocks: Sequence[int]) -> None:
        """End one use of each block; a block that is free already is a bug of ours.

        Of blocks in a row the last is evicted first: the first ones are what another request may begin with.
        """
        for block in reversed(blocks):
            assert self._ref_counts[block], f"block {block} freed twice"
            self._ref_counts[block] -= 1
            if self._ref_counts[block]:
                continue
            if block in self._key_of:
                self._idle[block] = None
            else:
                self._empty.append(block)


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that `num_tokens` cached tokens of one request take.

    >>> blocks_for(16, 16), blocks_for(17, 16), blocks_for(0, 16)
    (1, 2, 0)
    """
    return -(-num_tokens // block_size)
