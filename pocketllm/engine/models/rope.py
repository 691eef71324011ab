"""Rotary position embedding: which frequencies a checkpoint's scaling asks for, in numpy.

Su et al. 2021, "RoFormer" (arXiv 2104.09864) for the rotation; Chen et al. 2023, "Extending context window … via
position interpolation" (arXiv 2306.15595) for linear scaling; Peng et al. 2023, "YaRN" (arXiv 2309.00071); llama 3.1's
rule reaches a GGUF as one divisor a frequency (`rope_freqs.weight`).
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pocketllm.engine.models.header import HeaderReader

Float64Array = npt.NDArray[np.float64]
Float32Array = npt.NDArray[np.float32]

SCALING_TYPES = ("none", "linear", "yarn")


@dataclass(frozen=True)
class RopeSpec:
    """How one checkpoint rotates: `dim` leading values of each head, base `theta`, and its scaling."""

    dim: int
    theta: float
    scaling: str
    """One of SCALING_TYPES; llama 3.1's divisors come beside it, as a tensor."""
    factor: float
    """How many times longer the context became."""
    original_context: int
    """Context before scaling, in tokens (YaRN)."""
    attention_factor: float
    """What the file multiplies cos and sin by, on top of what its scaling implies."""
    beta_fast: float
    """YaRN: dimensions that turn at least this often within the original context keep their frequency."""
    beta_slow: float
    """YaRN: those that turn at most this often are interpolated."""
    rounds_ramp: bool = True
    """YaRN: whether the ramp between begins and ends at whole pairs, as in the paper's code."""
    yarn_magnitude: float | None = None
    """YaRN: what the file says that cos and sin are multiplied by instead of what its factor implies."""


def read_rope(header: HeaderReader, dim: int, context_length: int) -> RopeSpec:
    """Rope keys of a GGUF header (`<architecture>.rope.*`); a factor without a type means linear, as in GGUF."""
    factor_key = "rope.scaling.factor" if header.has("rope.scaling.factor") else "rope.scale_linear"
    return RopeSpec(
        dim=dim,
        theta=header.positive("rope.freq_base", 10000.0),
        scaling=str(header.metadata.get(f"{header.architecture}.rope.scaling.type", "linear")),
        factor=header.positive(factor_key, 1.0),
        original_context=header.count("rope.scaling.original_context_length", context_length),
        attention_factor=header.positive("rope.scaling.attn_factor", 1.0),
        beta_fast=header.positive("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=header.positive("rope.scaling.yarn_beta_slow", 1.0),
        yarn_magnitude=header.positive_or_none("rope.scaling.yarn_attn_factor"),
    )


def inverse_frequencies(spec: RopeSpec, divisors: Float32Array | None = None) -> Float32Array:
    """Radians a position of each rotated pair: [dim / 2].

    Unscaled: theta^(-2i/dim). divisors: `rope_freqs.weight`, [dim / 2], divides them first.
    """
    plain: Float64Array = spec.theta ** (-np.arange(0, spec.dim, 2, dtype=np.float64) / spec.dim)
    if divisors is not None:
        plain = plain / divisors.astype(np.float64)
    match spec.scaling:
        case "none":
            scaled = plain
        case "linear":
            scaled = plain / spec.factor
        case "yarn":
            keep = yarn_kept_share(spec)
            scaled = plain * keep + plain / spec.factor * (1.0 - keep)
        case _:
            raise AssertionError(spec.scaling)
    return scaled.astype(np.float32)


def yarn_kept_share(spec: RopeSpec) -> Float64Array:
    """How much of each pair's own frequency YaRN keeps, 1 … 0: [dim / 2] (the paper's γ, ramped over the pair index).

    A pair turns original_context · theta^(-2i/dim) / 2π times within the original context; solved for i at beta_fast
    and beta_slow turns, then rounded outwards where the models that use it were trained so.
    """

    def pair_that_turns(times: float) -> float:
        turns = spec.original_context / (times * 2.0 * math.pi)
        return spec.dim * math.log(turns) / (2.0 * math.log(spec.theta))

    first, last = pair_that_turns(spec.beta_fast), pair_that_turns(spec.beta_slow)
    if spec.rounds_ramp:
        first, last = math.floor(first), math.ceil(last)
    low, high = max(first, 0), min(last, spec.dim - 1)
    pairs = np.arange(spec.dim // 2, dtype=np.float64)
    # a ramp of no width would divide by zero
    interpolated = np.clip((pairs - low) / max(high - low, 0.001), 0.0, 1.0)
    return np.asarray(1.0 - interpolated)


def rope_magnitude(spec: RopeSpec, log_multiplier: float = 0.1) -> float:
    """What cos and sin are multiplied by: YaRN's 1 + multiplier · ln(factor), times the file's own attention factor.

    What a file says that YaRN multiplies by stands for what its factor implies.
    """
    if spec.scaling != "yarn" or spec.factor <= 1.0:
        return spec.attention_factor
    implied = 1.0 + log_multiplier * math.log(spec.factor)
    return spec.attention_factor * (spec.yarn_magnitude or implied)
