"""Tiny random checkpoints of any plain family, written as GGUF: the tensors that the family asks for, in float32."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from pocketllm.engine.models.blocks import read_dense_shape
from pocketllm.engine.models.header import HeaderReader
from tests.tiny import add_value, vocabulary

BASE: Mapping[str, Any] = {
    "block_count": 2,
    "context_length": 512,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 10000.0,
}
LATENT: Mapping[str, Any] = {
    "attention.head_count_kv": 1,
    "attention.q_lora_rank": 48,
    "attention.kv_lora_rank": 32,
    "attention.key_length": 48,
    "attention.value_length": 32,
    "attention.key_length_mla": 32,
    "attention.value_length_mla": 24,
    "rope.dimension_count": 16,
    "leading_dense_block_count": 1,
    "expert_count": 8,
    "expert_used_count": 2,
    "expert_shared_count": 1,
    "expert_feed_forward_length": 32,
}
EXPERTS: Mapping[str, Any] = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32}
HYBRID: Mapping[str, Any] = {
    "block_count": 4,
    "rope.dimension_count": 4,
    "full_attention_interval": 4,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 64,
}
SHORT_CONV: Mapping[str, Any] = {
    "block_count": 4,
    "attention.head_count_kv": [0, 0, 2, 0],
    "shortconv.l_cache": 3,
}
OWN_BASE: Mapping[str, Mapping[str, Any]] = {
    "qwen3moe": EXPERTS,
    "qwen3next": {**HYBRID, **EXPERTS},
    "qwen35": HYBRID,
    "qwen35moe": {**HYBRID, **EXPERTS, "feed_forward_length": None},
    "qwen4exp": {
        **HYBRID,
        **EXPERTS,
        "feed_forward_length": None,
        "attention.compress_ratios": [0, 0, 0, 4],
        "attention.indexer.head_count": 16,
        "attention.indexer.key_length": 16,
        "attention.indexer.top_k": 16,
        "hyper_connection.count": 4,
        "hyper_connection.low_rank": 8,
        "embedding_length_per_layer_input": 16,
        "ple.layers": [1],
        "ple.ngram_size": 3,
        "ple.heads_per_ngram": 2,
        "ple.conv_kernel": 4,
        "ple.eos_token_id": 2,
        "ple.layer_multipliers": [1000003, 48271, 16777619],
        "ple.head_vocab_sizes": [61, 67, 71, 73],
        "ple.head_offsets": [0, 61, 128, 199],
    },
    "gpt-oss": {
        **EXPERTS,
        "attention.sliding_window": 8,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 24,
    },
    "gemma4": {
        "block_count": 4,
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": [True, False, True, False],
        "attention.key_length": 32,
        "attention.value_length": 32,
        "attention.key_length_swa": 16,
        "attention.value_length_swa": 16,
        "rope.dimension_count": 32,
        "rope.dimension_count_swa": 16,
        "embedding_length_per_layer_input": 8,
    },
    "deepseek4": {
        "block_count": 4,
        "feed_forward_length": None,
        "attention.head_count_kv": 1,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "attention.q_lora_rank": 48,
        "attention.sliding_window": 8,
        "attention.output_group_count": 2,
        "attention.output_lora_rank": 16,
        "attention.compress_ratios": [0, 4, 8, 4, 0],
        "attention.compress_rope_freq_base": 160000.0,
        "attention.indexer.head_count": 16,
        "attention.indexer.key_length": 16,
        "attention.indexer.top_k": 4,
        "rope.dimension_count": 16,
        **EXPERTS,
        "expert_shared_count": 1,
        "expert_gating_func": 4,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.5,
        "swiglu_clamp_exp": [10.0] * 4,
        "swiglu_clamp_shexp": [10.0] * 4,
        "hyper_connection.count": 4,
        "hyper_connection.sinkhorn_iterations": 20,
        "hyper_connection.epsilon": 1e-6,
        "hash_layer_count": 1,
    },
    "glm5-next": {
        "block_count": 4,
        "attention.head_count_kv": [0, 1, 0, 1],
        "attention.q_lora_rank": 48,
        "attention.kv_lora_rank": 32,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "attention.key_length_mla": 24,
        "attention.value_length_mla": 20,
        "attention.indexer.head_count": 16,
        "attention.indexer.key_length": 16,
        "attention.indexer.top_k": 16,
        "attention.indexer.kpool": 4,
        "attention.indexer.kpool_select_tail": True,
        "rope.dimension_count": 0,
        "kda.head_dim": 16,
        "kda.gate_lower_bound": -5.0,
        "ssm.conv_kernel": 4,
        "leading_dense_block_count": 1,
        **EXPERTS,
        "expert_shared_count": 1,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
        "swiglu_clamp_exp": [10.0] * 4,
        "swiglu_clamp_shexp": [10.0] * 4,
        "hyper_connection.count": 4,
        "hyper_connection.sinkhorn_iterations": 20,
        "hyper_connection.epsilon": 1e-6,
    },
    "lfm2": SHORT_CONV,
    "lfm2moe": {**SHORT_CONV, **EXPERTS, "leading_dense_block_count": 1, "expert_gating_func": 2},
    "deepseek2": LATENT,
    "glm-dsa": {
        **LATENT,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
        "attention.indexer.head_count": 16,
        "attention.indexer.key_length": 32,
        "attention.indexer.top_k": 8,
    },
    "minimax-m2": {
        **EXPERTS,
        "expert_gating_func": 2,
    },
    "mimo2": {
        **EXPERTS,
        "attention.key_length": 24,
        "attention.value_length": 16,
        "attention.head_count_kv": [2, 4],
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": [False, True],
        "attention.value_scale": 0.707,
        "rope.dimension_count": 8,
        "expert_gating_func": 2,
    },
    "xing4_0": {
        **LATENT,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.0,
        "hyper_connection.count": 4,
        "hyper_connection.sinkhorn_iterations": 20,
        "hyper_connection.epsilon": 1e-6,
    },
}
"""Keys that a family needs on top."""


@dataclass(frozen=True)
class TinyFamily:
    """One checkpoint to be made. keys: over BASE, without the architecture's name; None leaves one out."""

    architecture: str
    seed: int = 0
    keys: Mapping[str, Any] = field(default_factory=dict)
    tied: bool = True
    tensors: Mapping[str, npt.NDArray[np.float32] | None] = field(default_factory=dict)
    """More tensors by name; None leaves one out."""
    spoiled: Mapping[str, Any] = field(default_factory=dict)
    """Keys as in `keys` that the file says and its tensors do not follow."""
    others: Mapping[str, Any] = field(default_factory=dict)
    """More keys, by their full names."""
    quant_type: str = "F32"
    """Of the matrices whose rows are whole blocks of it."""

    def metadata(self) -> dict[str, Any]:
        """Every key, the tokenizer's too."""
        own = {
            f"{self.architecture}.{name}": value
            for name, value in {**BASE, **OWN_BASE.get(self.architecture, {}), **self.keys}.items()
        }
        return {name: value for name, value in {**own, **vocabulary()}.items() if value is not None}


def write_family(path: Path, spec: TinyFamily) -> Path:
    """Write a checkpoint; milliseconds."""
    writer = gguf.GGUFWriter(path, spec.architecture)
    spoiled = {f"{spec.architecture}.{name}": value for name, value in spec.spoiled.items()}
    for key, value in {**spec.metadata(), **spoiled, **spec.others}.items():
        add_value(writer, key, value)
    for name, values in {**weights(spec), **spec.tensors}.items():
        if values is not None and is_packed(spec, name, values):
            kind = gguf.GGMLQuantizationType[spec.quant_type]
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        elif values is not None:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def is_packed(spec: TinyFamily, name: str, values: npt.NDArray[np.floating]) -> bool:
    """Whether a tensor is stored in the checkpoint's quant type; kernels of convolutions never are."""
    kind = gguf.GGMLQuantizationType[spec.quant_type]
    elements, _ = gguf.GGML_QUANT_SIZES[kind]
    is_matrix = (
        values.ndim > 1
        and values.dtype == np.float32
        and name.endswith(".weight")
        and "conv" not in name.split(".")[-2]
    )
    return spec.quant_type != "F32" and is_matrix and values.shape[-1] % elements == 0


def decoded(spec: TinyFamily) -> dict[str, npt.NDArray[np.float32]]:
    """What the packed matrices of a checkpoint stand for, by the `gguf` package."""
    kind = gguf.GGMLQuantizationType[spec.quant_type]
    packed = {name: values for name, values in weights(spec).items() if is_packed(spec, name, values)}
    return {
        name: gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind).reshape(values.shape)
        for name, values in packed.items()
    }


def weights(spec: TinyFamily) -> dict[str, npt.NDArray[np.float32]]:
    """Random tensors by name from numpy's frozen legacy generator; norms and scales around 1, the rest around 0."""
    family = import_module(f"pocketllm.engine.models.families.{spec.architecture.replace('-', '_')}")
    read = getattr(family, "read_shape", read_dense_shape)  # what the plainest families use
    needed, optional = family.tensor_shapes(read(HeaderReader(spec.metadata(), spec.architecture), vocab_size=512))
    shapes = needed if spec.tied else needed | {"output.weight": optional["output.weight"]}
    random = np.random.RandomState(spec.seed)
    tensors = {}
    for name in sorted(shapes):
        scale = 0.1 if len(shapes[name]) == 1 else 0.15
        around = 1 if "norm" in name or name.endswith(("_scale.weight", "_inp.scale")) else 0
        values = random.standard_normal(shapes[name]) * scale + around
        if name.endswith("ssm_a"):
            values = -np.exp(values)  # a decay grows nothing
        elif "ssm_conv1d" in name or name.endswith("shortconv.conv.weight"):
            values *= 4  # or what comes after sees little of it
        tensors[name] = values.astype(np.float32)
        if name.endswith("tid2eid.weight"):  # experts of each token id, none of them twice
            tensors[name] = experts_of_ids(values, spec)
    return tensors


def experts_of_ids(values: npt.NDArray[np.floating], spec: TinyFamily) -> npt.NDArray[Any]:
    """[vocab, used]: as many neighboring experts from a random one on."""
    count = spec.metadata()[f"{spec.architecture}.expert_count"]
    first = (np.abs(values[:, :1]) * 1e4).astype(np.int32)
    chosen: npt.NDArray[np.int32] = (first + np.arange(values.shape[1], dtype=np.int32)) % np.int32(count)
    return chosen
