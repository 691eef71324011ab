"""Computes masks beside the forward pass, so that a step waits for neither."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from pocketllm.engine.structured.matcher import Matcher


class MaskWorker:
    """One thread, made when first needed: what it calls drops the interpreter lock, and so does a forward pass."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def prefetch(self, matchers: Iterable[Matcher]) -> None:
        """Begin to compute what is not computed yet; whoever needs a mask waits for it."""
        for matcher in matchers:
            if not matcher.is_computed:
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(1, "pocketllm-masks")
                matcher.pending = self._pool.submit(matcher.compute)

    def close(self) -> None:
        """End the thread."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
