"""The paged cache's free list: which blocks hold somebody's keys and values; pure."""

from collections.abc import Sequence


class BlockPool:
    """`num_blocks` cache blocks, each free or owned by exactly one request."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, num_blocks
        self.num_blocks = num_blocks
        # a stack, lowest id on top: recently used blocks are warm in the processor's caches
        self._free = list(range(num_blocks - 1, -1, -1))
        self._is_used = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks; the caller has checked `num_free`."""
        assert 0 <= count <= len(self._free), (count, len(self._free))
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._is_used[block] = 1
        return taken

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back; a block that is free already is a bug of ours."""
        for block in reversed(blocks):
            assert self._is_used[block], f"block {block} freed twice"
            self._is_used[block] = 0
            self._free.append(block)


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that `num_tokens` cached tokens of one request take.

    >>> blocks_for(16, 16), blocks_for(17, 16), blocks_for(0, 16)
    (1, 2, 0)
    """
    return -(-num_tokens // block_size)
