"""What one step hands to a model: a flat batch of ragged rows over paged keys and values."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class ForwardBatch:
    """One step's input, numpy only; gathered from the requests, used once, thrown away.

    tokens = all scheduled tokens of all sequences, one sequence after another.
    """

    input_ids: Int32Array
    """[tokens]; one may stand for a token that is still being drawn, see `drawing.Drawer`."""
    positions: Int32Array
    """[tokens] position of each token in its own sequence."""
    query_start_loc: Int32Array
    """[sequences + 1] where each sequence's tokens begin in the flat batch."""
    seq_lens: Int32Array
    """[sequences] length of each sequence after this step, cached tokens included."""
    block_table: Int32Array
    """[sequences, blocks] cache blocks of each sequence in order; unused entries are -1."""
    slot_mapping: Int64Array
    """[tokens] flat cache slot (block * block_size + offset) where each token's key and value go."""
    logit_rows: Int32Array
    """[rows] which tokens' logits are wanted."""
    state_slots: Int32Array = field(default_factory=lambda: np.zeros(0, np.int32))
    """[sequences] where each sequence's recurrent state is kept; empty when the model has none."""
    window_table: Int32Array = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    """As block_table, of caches in windows; in place of a block that no window shows any more stands any of its own."""
    window_slots: Int64Array = field(default_factory=lambda: np.zeros(0, np.int64))
    """As slot_mapping, of caches in windows. Both are empty when the model has none."""
    answers: BoolArray = field(default_factory=lambda: np.zeros(0, np.bool_))
    """[sequences] whether a sequence's token is one of its answer, fed back; otherwise they are of its prompt. Empty
    for a backend that need not know (`BackendCapability.answers_apart`)."""

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens)

    @property
    def is_single(self) -> bool:
        """Whether every sequence has one token in this step."""
        return len(self.input_ids) == len(self.seq_lens)


EMPTY_BATCH = ForwardBatch(
    input_ids=np.zeros(0, np.int32),
    positions=np.zeros(0, np.int32),
    query_start_loc=np.zeros(1, np.int32),
    seq_lens=np.zeros(0, np.int32),
    block_table=np.zeros((0, 0), np.int32),
    slot_mapping=np.zeros(0, np.int64),
    logit_rows=np.zeros(0, np.int32),
)
"""A step of no sequence: what backends capture steps with."""


@dataclass(frozen=True)
class AttentionSpec:
    """Geometry of one attention layer; q, k and v cross the seam flat: [tokens, heads * head_dim]."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    """A token sees itself and the window - 1 before it; None: all before it."""
    softcap: float | None = None
    """Scores become softcap · tanh(score / softcap) before the softmax (Gemma 2); None: as they are."""


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Geometry of multi-head latent attention in its absorbed form (DeepSeek-AI 2024, arXiv 2405.04434).

    All heads share one cached row a token: `rank` values, both key and value, then a rotated key of `rope_dim` values.
    """

    num_heads: int
    rank: int
    rope_dim: int
    scale: float


@dataclass(frozen=True)
class IndexerSpec:
    """Geometry of the indexer that picks each token's keys (DeepSeek-AI 2025, "DeepSeek-V3.2", arXiv 2512.02556)."""

    num_heads: int
    dim: int
    top_k: int
