"""Multi-head latent attention in plain torch: heads are folded into rows, so that a cached row is read once for all."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pocketllm.engine.backends.api.attention import AttentionSpec, IndexerSpec, LatentAttentionSpec
from pocketllm.engine.backends.reference.attention import StepPlan, attend, gather
from pocketllm.engine.backends.reference.rows import pad_rows


@dataclass
class LatentCache:
    """rows: one tensor a layer, [blocks, block_size, 1, dim], zeros at first."""

    rows: Sequence[Tensor]

    @property
    def block_size(self) -> int:
        return self.rows[0].shape[1]


def latent_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    rows: Tensor,
    step: StepPlan,
    spec: LatentAttentionSpec,
    selection: Sequence[Tensor] | None,
) -> Tensor:
    """Attention with one key head of rank + rope_dim values, whose first `rank` values are the values too.

    rows: one layer's cache; selection: as `select_keys` gave it; the result is [tokens, heads * rank].
    """
    tokens = len(q_latent)
    parts = q_latent.view(tokens, spec.num_heads, spec.rank), q_rope.view(tokens, spec.num_heads, spec.rope_dim)
    q = torch.cat(parts, -1).view(tokens, -1)
    geometry = AttentionSpec(spec.num_heads, 1, spec.rank + spec.rope_dim, spec.scale)
    mixed = []
    for number, plan in enumerate(step.sequences):
        keys = gather(rows, plan)
        keys[:, plan.length :] = 0.0  # weighed with zero, which would not quiet an infinity left by another
        values = keys[..., : spec.rank]
        hidden = plan.hidden(None) if selection is None else selection[number]
        mixed.append(attend(q[plan.first : plan.last], keys, values, hidden, geometry))
    return mixed[0] if len(mixed) == 1 else torch.cat(mixed)


def select_keys(q: Tensor, weights: Tensor, rows: Tensor, step: StepPlan, spec: IndexerSpec) -> list[Tensor]:
    """For each sequence, True where a query does not look: [queries, 1, keys], as `SequencePlan.hidden`."""
    selection = []
    for plan in step.sequences:
        queries, hidden = plan.last - plan.first, plan.hidden(None)
        by_head = pad_rows(q[plan.first : plan.last].view(queries * spec.num_heads, spec.dim))
        matches = functional.linear(by_head, gather(rows, plan)[0])[: queries * spec.num_heads].relu_()
        matches = matches.view(queries, spec.num_heads, -1)
        scores = matches[:, 0] * weights[plan.first : plan.last, :1]
        for head in range(1, spec.num_heads):  # one after another: a score has the same bits in any company
            scores += matches[:, head] * weights[plan.first : plan.last, head : head + 1]
        scores.masked_fill_(hidden[:, 0], -torch.inf)
        best = scores.sort(dim=-1, descending=True, stable=True).indices[:, : spec.top_k]
        left_out = torch.ones_like(hidden[:, 0]).scatter_(-1, best, False)
        selection.append(hidden | left_out[:, None])
    return selection


def project_heads(x: Tensor, weight: Tensor) -> Tensor:
    """Each head through its own matrix. x: [tokens, heads * in]; weight: [heads, out, in]."""
    tokens, heads = len(x), len(weight)
    by_head = pad_rows(x.view(tokens, heads, -1).transpose(0, 1))
    return torch.bmm(by_head, weight.transpose(1, 2))[:, :tokens].transpose(0, 1).reshape(tokens, -1)
