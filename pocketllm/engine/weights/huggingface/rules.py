"""How a tensor of a Hugging Face directory becomes the GGUF tensor that a family reads.

Elements move as they are, in whatever type they have; only what is computed becomes float32. Vectors are float32 in
GGUF, whatever the matrices are.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.errors import CheckpointError

Order = npt.NDArray[np.intp]
Compute = Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]]
MOST: Mapping[str, int] = {
    "num_hidden_layers": 512,
    **dict.fromkeys(("num_experts", "num_local_experts"), 2048),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), 4096),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4096),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 4096),
}
"""More than any published model has, of what rules and orders of rows grow with before a tensor is looked at."""


@dataclass(frozen=True)
class Rule:
    """One tensor: its GGUF name, then what is done to it, in this order."""

    name: str
    rows: Order | None = None
    """Which row of the directory's tensor each row is."""
    columns: Order | None = None
    """The same of columns."""
    compute: Compute | None = None
    """Of its values; the result is float32."""
    shape: tuple[int, ...] | None = None
    """Its shape where that is not the directory's: of as many values, and before rows and columns move."""
    part: int | None = None
    """Its place in a tensor that several make, one after another along a new first axis: the number of an expert."""
    transposed: bool = False
    """Whether its last two axes are the other way round in the directory."""
    share: slice | None = None
    """Which of its rows, where a tensor of the directory holds several of GGUF's."""
    share_axis: int = -2
    """-1 where those rows are the values of a bias for each expert."""


@dataclass(frozen=True)
class Mapped:
    """What an architecture makes of a config.json: GGUF keys, a rule for each tensor it knows, tensors it computes.

    shared: rules of the tensors that hold several of GGUF's; ignored: how names begin that belong to no text model.
    """

    metadata: Mapping[str, Any]
    rules: Mapping[str, Rule]
    made: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    shared: Mapping[str, tuple[Rule, ...]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def rules_of(self, name: str) -> tuple[Rule, ...]:
        """Rules of a tensor; one that none knows keeps its name, for the family to refuse it by."""
        return self.shared.get(name) or (self.rules.get(name) or Rule(name),)


@dataclass(frozen=True)
class Config:
    """A config.json with the promise that what is asked for is there and of the right kind."""

    values: Mapping[str, Any]

    @classmethod
    def of_text(cls, values: Mapping[str, Any]) -> "Config":
        """Of a model's text part, where it has others: what is said within `text_config` counts first."""
        inner = values.get("text_config")
        if not isinstance(inner, Mapping):
            return cls(values)
        said = {name: value for name, value in inner.items() if value is not None and name != "model_type"}
        return cls({**values, **said})

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number above 0."""
        value = self.values.get(name)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise CheckpointError(f"config.json: {name} is {value!r:.60}, but must be a whole number above 0")
        if value > MOST.get(name, value):
            raise CheckpointError(f"config.json: {name} is {value!s:.60}, but at most {MOST[name]} can be read")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number above 0."""
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise CheckpointError(f"config.json: {name} is {value!r:.60}, but must be a number above 0")
        return float(value)

    def require(self, name: str, *allowed: Any) -> None:
        """Refuse a key whose value is another than these (the first is what absent means)."""
        value = self.values.get(name, allowed[0])
        if value not in allowed:
            raise CheckpointError(f"config.json: {name} is {value!r:.60}, but only {allowed[0]!r} can be computed here")

    @property
    def head_dim(self) -> int:
        """Values of a head, an even number: its halves are rotated together."""
        dim = self.count("head_dim", self.count("hidden_size") // self.count("num_attention_heads"))
        if dim % 2:
            raise CheckpointError(f"config.json: heads have {dim} values (head_dim), but must have an even number")
        return dim

    @property
    def num_experts(self) -> int:
        """Experts of a layer, by either of two names."""
        return self.count("num_experts" if "num_experts" in self.values else "num_local_experts")

    def rope(self, layers: str | None = None) -> "Config":
        """Rotary parameters, in whichever of the two forms; layers: of this kind of layer where kinds differ."""
        said = self.values.get("rope_parameters")
        if isinstance(said, Mapping) and layers is not None and isinstance(said.get(layers), Mapping):
            said = said[layers]
        if not isinstance(said, Mapping):
            scaling = self.values.get("rope_scaling")
            theta = self.values.get("rope_theta", 10000.0)
            said = {**(scaling if isinstance(scaling, Mapping) else {}), "rope_theta": theta}
        return Config({**said, "rope_type": said.get("rope_type", said.get("type", "default"))})


def decoder(architecture: str, config: Config, intermediate: int | None = None) -> dict[str, Any]:
    """GGUF keys of a plain decoder, its rotary positions left out. intermediate: where the config need not say it."""
    keys = {
        "block_count": config.count("num_hidden_layers"),
        "context_length": config.count("max_position_embeddings"),
        "embedding_length": config.count("hidden_size"),
        "feed_forward_length": config.count("intermediate_size", intermediate),
        "attention.head_count": config.count("num_attention_heads"),
        "attention.head_count_kv": config.count("num_key_value_heads", config.count("num_attention_heads")),
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.number("rms_norm_eps"),
    }
    return prefixed(architecture, keys)


def prefixed(architecture: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of one architecture by their full names."""
    return {f"{architecture}.{name}": value for name, value in keys.items()}


def rotary(rope: Config, *, rounds_ramp: bool = True) -> dict[str, Any]:
    """GGUF rope keys; CheckpointError for a scaling that GGUF has no keys for. llama 3's is a tensor, and not here.

    rounds_ramp: whether the family's YaRN has a ramp between whole pairs.
    """
    kind, keys = rope.values["rope_type"], {"rope.freq_base": rope.number("rope_theta", 10000.0)}
    if kind in ("default", "llama3"):
        return keys
    if kind not in ("linear", "yarn"):
        raise CheckpointError(f"config.json: rope_type {kind!r:.40} is not known; known: default, linear, llama3, yarn")
    keys |= {"rope.scaling.type": kind, "rope.scaling.factor": rope.number("factor")}
    if kind == "yarn":
        keys |= _magnitude(rope)
        if rope.values.get("truncate", True) is not rounds_ramp:
            raise CheckpointError(
                f"config.json: truncate is {not rounds_ramp}, but only {rounds_ramp} is computed here"
            )
        keys["rope.scaling.original_context_length"] = rope.count("original_max_position_embeddings")
        keys["rope.scaling.yarn_beta_fast"] = rope.number("beta_fast", 32.0)
        keys["rope.scaling.yarn_beta_slow"] = rope.number("beta_slow", 1.0)
    return keys


def _magnitude(rope: Config) -> dict[str, float]:
    """What YaRN multiplies cos and sin by, where it is said: itself, or as a quotient of two, as DeepSeek has it."""
    if rope.values.get("attention_factor") is not None:
        return {"rope.scaling.yarn_attn_factor": rope.number("attention_factor")}
    if not (rope.values.get("mscale") and rope.values.get("mscale_all_dim")):
        return {}
    grown = max(0.1 * math.log(rope.number("factor")), 0.0)
    over, under = (1.0 + grown * rope.number(name) for name in ("mscale", "mscale_all_dim"))
    return {"rope.scaling.yarn_attn_factor": over / under}


def around(rename: Compute | None = None) -> dict[str, Rule]:
    """The tensors outside of the layers; rename: computed of the last norm."""
    return {
        "model.embed_tokens.weight": Rule("token_embd.weight"),
        "model.norm.weight": Rule("output_norm.weight", compute=rename),
        "lm_head.weight": Rule("output.weight"),
    }


def layers(config: Config, rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """Rules of one layer, given by names within it and without `.weight`, for each layer, weights and biases."""
    return in_layers(
        config,
        {
            f"{name}.{kind}": replace(rule, name=f"{rule.name}.{kind}")
            for name, rule in rules.items()
            for kind in ("weight", "bias")
        },
    )


def in_layers(config: Config, rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """Rules of one layer, given by whole names within it, for each layer."""
    return {
        f"model.layers.{number}.{name}": replace(rule, name=f"blk.{number}.{rule.name}")
        for number in range(config.count("num_hidden_layers"))
        for name, rule in rules.items()
    }


def shared_in_layers(config: Config, rules: Mapping[str, tuple[Rule, ...]]) -> dict[str, tuple[Rule, ...]]:
    """The same of tensors that hold several of GGUF's."""
    return {
        f"model.layers.{number}.{name}": tuple(replace(rule, name=f"blk.{number}.{rule.name}") for rule in made)
        for number in range(config.count("num_hidden_layers"))
        for name, made in rules.items()
    }


def experts(number: int) -> dict[str, Rule]:
    """A layer's matrices of so many experts, a tensor for each in the directory and one for all in GGUF."""
    return {
        f"mlp.experts.{expert}.{part}_proj.weight": Rule(f"ffn_{part}_exps.weight", part=expert)
        for expert in range(number)
        for part in ("gate", "up", "down")
    }


def fused_experts(intermediate: int) -> dict[str, tuple[Rule, ...]]:
    """The same in one tensor for all, gates and what they let through one after the other."""
    return {
        "mlp.experts.gate_up_proj": (
            Rule("ffn_gate_exps.weight", share=slice(None, intermediate)),
            Rule("ffn_up_exps.weight", share=slice(intermediate, None)),
        ),
        "mlp.experts.down_proj": (Rule("ffn_down_exps.weight"),),
    }


ATTENTION: Mapping[str, Rule] = {f"self_attn.{part}_proj": Rule(f"attn_{part}") for part in "qkv"} | {
    "self_attn.o_proj": Rule("attn_output")
}
FEED_FORWARD: Mapping[str, Rule] = {f"mlp.{part}_proj": Rule(f"ffn_{part}") for part in ("gate", "up", "down")}
NORMS: Mapping[str, Rule] = {
    "input_layernorm": Rule("attn_norm"),
    "post_attention_layernorm": Rule("ffn_norm"),
}
HEAD_NORMS: Mapping[str, Rule] = {f"self_attn.{part}_norm": Rule(f"attn_{part}_norm") for part in "qk"}


def plus_one(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Norms that are stored without their 1."""
    return values + np.float32(1)


def computed(rules: Mapping[str, Rule], compute: Compute) -> dict[str, Rule]:
    """The same rules with a computation."""
    return {name: Rule(rule.name, compute=compute) for name, rule in rules.items()}


def merged(*parts: Mapping[str, Rule]) -> dict[str, Rule]:
    """Several rules as one table."""
    return {name: rule for part in parts for name, rule in part.items()}


def local_layers(config: Config, period: int) -> list[bool]:
    """For each layer whether it sees a window; period: every how many the last one sees all, where nothing says it."""
    number, kinds = config.count("num_hidden_layers"), sequence(config.values.get("layer_types"))
    if not kinds:
        return [(layer + 1) % period != 0 for layer in range(number)]
    if len(kinds) != number or set(kinds) - {"sliding_attention", "full_attention"}:
        raise CheckpointError("config.json: layer_types must be sliding_attention or full_attention for each layer")
    return [kind == "sliding_attention" for kind in kinds]


def sequence(values: Any) -> Sequence[Any]:
    """A list of a config.json; empty where it is none."""
    return values if isinstance(values, list) else []
