"""A hybrid of Gated DeltaNet and attention on the GPU: an engine's answers from its caches, and rates of a 9B's layers.

usage: python -m tests.cuda.hybrid [answers] [rates]
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm import LLM, SamplingParams
from pocketllm.engine.backends.cuda.ops import CudaOps
from tests.cuda.model import Session, decode, profile
from tests.cuda.synthetic import Synthetic
from tests.cuda.words import asked

ORACLES = Path(__file__).parents[1] / "oracles"
HIDDEN, INNER, VOCAB, HEADS, KV_HEADS, HEAD_DIM = 4096, 12288, 32768, 16, 4, 256
KEY_HEADS, VALUE_HEADS, DIM, TAPS = 16, 32, 128, 4


class Hybrid(Synthetic):
    """A qwen35 checkpoint with the layers of Qwen3.5-9B, in Q4_K with Q6_K where Q4_K_M has it at least."""

    def __init__(self, layers: int) -> None:
        super().__init__(1, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB, types=("Q4_K", "Q6_K", "Q6_K"))
        keys = {
            "block_count": layers, "context_length": 8192, "embedding_length": HIDDEN, "feed_forward_length": INNER,
            "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.key_length": HEAD_DIM,
            "attention.value_length": HEAD_DIM, "rope.dimension_count": 64, "rope.freq_base": 1e7,
            "attention.layer_norm_rms_epsilon": 1e-6, "full_attention_interval": 4, "ssm.conv_kernel": TAPS,
            "ssm.state_size": DIM, "ssm.group_count": KEY_HEADS, "ssm.time_step_rank": VALUE_HEADS,
            "ssm.inner_size": VALUE_HEADS * DIM,
        }  # fmt: skip
        self.metadata: Mapping[str, Any] = {
            "general.architecture": "qwen35", **{f"qwen35.{key}": value for key, value in keys.items()}
        }  # fmt: skip
        self.tensors = {name: info for name, info in self.tensors.items() if not name.startswith("blk.")}
        for layer in range(layers):
            self._add_layer(f"blk.{layer}.", (layer + 1) % 4 == 0)

    def _add_layer(self, block: str, has_attention: bool) -> None:
        inner, channels = VALUE_HEADS * DIM, (2 * KEY_HEADS + VALUE_HEADS) * DIM
        attention = {
            "attn_q": (2 * HEADS * HEAD_DIM, HIDDEN), "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN), "attn_output": (HIDDEN, HEADS * HEAD_DIM),
        }  # fmt: skip
        recurrent = {"attn_qkv": (channels, HIDDEN), "attn_gate": (inner, HIDDEN), "ssm_out": (HIDDEN, inner)}
        feed_forward = {"ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER)}
        for name, matrix in {**(attention if has_attention else recurrent), **feed_forward}.items():
            self._add(f"{block}{name}.weight", "Q6_K" if name in ("attn_v", "ffn_down") else "Q4_K", *matrix)
        plain: dict[str, tuple[int, ...]] = dict.fromkeys(("attn_norm.weight", "post_attention_norm.weight"), (HIDDEN,))
        if has_attention:
            plain |= dict.fromkeys(("attn_q_norm.weight", "attn_k_norm.weight"), (HEAD_DIM,))
        else:
            plain |= {
                "ssm_conv1d.weight": (channels, TAPS), "ssm_a": (VALUE_HEADS,), "ssm_dt.bias": (VALUE_HEADS,),
                "ssm_norm.weight": (DIM,), "ssm_alpha.weight": (VALUE_HEADS, HIDDEN),
                "ssm_beta.weight": (VALUE_HEADS, HIDDEN),
            }  # fmt: skip
        for name, shape in plain.items():
            self._add(f"{block}{name}", "F32", *shape)

    def values(self, name: str) -> npt.NDArray[np.float32]:
        ones = super().values(name)
        return -ones if name.endswith("ssm_a") else ones


def answers() -> None:
    """Tokens of a tiny engine, cold, from snapshots and from ends of prompts: on the GPU, and by the reference."""
    greedy = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    prompts = [list(range(20, 60)), [*range(20, 55), 7, 8, 9], list(range(20, 60)), list(range(90, 95))]
    for name in ("qwen3_5_text", "lfm2", "qwen3_next"):
        told = {}
        for backend in ("cuda", "reference"):
            options: dict[str, Any] = {"backend": backend, "max_model_len": 128, "max_num_seqs": 4}
            with LLM(str(ORACLES / f"{name}.gguf"), **options) as llm:
                alone = [llm.generate([prompt], greedy)[0] for prompt in prompts]
                together = llm.generate(prompts, greedy)
            told[backend] = [tuple(one.token_ids) for one in (*alone, *together)]
            cached = [one.usage.cached_tokens for one in alone]
            print(f"{name} {backend}: cached {cached}, alone = together {told[backend][:4] == told[backend][4:]}")
        same = sum(a == b for a, b in zip(told["cuda"], told["reference"], strict=True))
        print(f"{name}: {same} of {len(told['cuda'])} answers are the reference's", flush=True)


def rates() -> None:
    """Steps of eight layers, six of them recurrent."""
    session = Session(Hybrid(8), CudaOps(), 32, 2560)
    ids = np.random.default_rng(0).integers(0, VOCAB, 2048).tolist()
    for count in (512, 2048):
        batch = session.batch([ids[:count]], [0])
        for _ in range(3):
            session.greedy(batch)
        profile_of(session, batch)
    for streams in (1, 8, 32):
        decode(session, streams, 325)
        profile(session, streams, 325)


def profile_of(session: Session, batch: Any) -> None:
    """Milliseconds of a prompt's step."""
    import time

    took = []
    for _ in range(5):
        start = time.perf_counter()
        session.greedy(batch)
        took.append(time.perf_counter() - start)
    print(f"prompt of {len(batch.input_ids)}: {sorted(took)[2] * 1e3:.2f} ms", flush=True)


if __name__ == "__main__":
    for name in asked(__doc__, ["answers", "rates"]):
        {"answers": answers, "rates": rates}[name]()
