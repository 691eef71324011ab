"""What the loop counts, and a snapshot of it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class LoopStats:
    """Gauges of now and counters since the loop was made."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_steps: int
    """Forward passes."""
    num_step_tokens: int
    """Tokens computed by them, recomputed ones included."""
    max_step_tokens: int
    max_step_seqs: int
    num_prompt_tokens: int
    """Prompt tokens of requests that have been prefilled."""
    num_generation_tokens: int
    num_preemptions: int
    num_prefix_queried_tokens: int | None
    """Tokens of admitted requests, recomputed ones included; None without a prefix cache."""
    num_prefix_hit_tokens: int | None
    """Those of them that were in the cache and were not computed."""
    num_submitted: int
    num_rejected: int
    """Refused at the door: the queue was full, or the request could not be served."""
    num_cancelled: int
    num_failed_steps: int
    num_compiles: int
    """Kernel compilations and graph captures of the backend since its load began; 0 where it has none."""
    finished: Mapping[str, int]
    """Requests by finish reason."""
    num_window_blocks: int = 0
    """Blocks of layers that see a window; 0 for a model without such layers."""
    num_free_window_blocks: int = 0

    @property
    def kv_usage(self) -> float:
        """Share of cache blocks in use, 0 to 1: of those that are scarcer, where layers that see a window have own."""
        share = 1.0 - self.num_free_blocks / self.num_blocks
        if self.num_window_blocks:
            share = max(share, 1.0 - self.num_free_window_blocks / self.num_window_blocks)
        return share


@dataclass
class Counters:
    """What has happened since the loop was made; `LoopStats` says what each means."""

    num_steps: int = 0
    num_step_tokens: int = 0
    max_step_tokens: int = 0
    max_step_seqs: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_submitted: int = 0
    num_rejected: int = 0
    num_cancelled: int = 0
    num_failed_steps: int = 0
    finished: Counter[str] = field(default_factory=Counter)

    def count(self, num_tokens: int, num_seqs: int) -> None:
        """A forward pass more; none where nothing was computed."""
        if num_tokens:
            self.num_steps += 1
            self.num_step_tokens += num_tokens
            self.max_step_tokens = max(self.max_step_tokens, num_tokens)
            self.max_step_seqs = max(self.max_step_seqs, num_seqs)
