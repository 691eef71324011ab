"""What families with latent attention say of a header: sizes when it can run, every reason when it cannot."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pocketllm.engine.backends.select import select_backend
from pocketllm.engine.models.contract import LatentSpec, SeveralCaches
from pocketllm.engine.models.header import HeaderReader
from pocketllm.engine.models.parts.attention.latent import read_latent_shape
from pocketllm.engine.models.registry import find_family
from pocketllm.engine.models.rope import inverse_frequencies, yarn_kept_share
from pocketllm.engine.options import EngineOptions
from pocketllm.engine.plan import unmet_capabilities
from pocketllm.engine.weights.checkpoint import open_checkpoint
from pocketllm.errors import GGUFError
from tests.parity.tiny_families import TinyFamily, weights, write_family
from tests.unit.test_plan import CAPABILITY

FAMILIES = ("deepseek2", "xing4_0", "glm-dsa")
OF_XING4 = {
    "attention.kv_lora_rank": 512,
    "attention.key_length_mla": 192,
    "rope.dimension_count": 64,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 64.0,
    "rope.scaling.original_context_length": 4096,
    "rope.scaling.yarn_log_multiplier": 0.1,
}


def unmet(path: Path, architecture: str, keys: dict[str, Any] | None = None, **tensors: Any) -> list[str]:
    """Reasons for a tiny checkpoint with other keys or tensors than it should have."""
    spec = TinyFamily(architecture, tensors=tensors, spoiled=keys or {})
    with open_checkpoint(write_family(path / "tiny.gguf", spec)) as checkpoint:
        return list(find_family(architecture).unmet(checkpoint))


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_family_is_found_and_takes_a_checkpoint_of_its_own(architecture: str, tmp_path: Path) -> None:
    family = find_family(architecture)
    metadata = TinyFamily(architecture, keys={"attention.kv_lora_rank": 40, "block_count": 3}).metadata()

    assert family.architecture == architecture
    latents = LatentSpec(3, 40 + 16)
    assert family.kv_spec(metadata) in (latents, SeveralCaches((latents, LatentSpec(3, 32))))
    assert family.context_length(metadata) == 512
    assert unmet(tmp_path, architecture) == []


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_absent_key_is_named_at_once(architecture: str) -> None:
    with pytest.raises(GGUFError) as raised:
        find_family(architecture).kv_spec({})

    for key in (
        "block_count", "embedding_length", "attention.head_count", "feed_forward_length", "context_length",
        "attention.kv_lora_rank", "attention.key_length", "attention.value_length", "rope.dimension_count",
        "expert_count", "expert_used_count", "expert_feed_forward_length",
    ):  # fmt: skip
        assert f"metadata key {architecture}.{key} is absent" in str(raised.value)


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("attention.head_count_kv", 4, "{}.attention.head_count_kv=4, but the header's other sizes make it 1"),
        ("attention.sliding_window", 64, "{}.attention.sliding_window=64 is not supported by family {}"),
        ("attention.key_length", 32, "{}.attention.key_length=32, but the header's other sizes make it 48"),
        ("attention.value_length", 24, "{}.attention.value_length=24, but the header's other sizes make it 32"),
        ("attention.key_length_mla", 16, "{}.attention.key_length_mla=16 must be above rope.dimension_count=16"),
        ("rope.scaling.type", "longrope", "rope scaling 'longrope' ({}.rope.scaling.type) is not supported by"),
        ("rope.scaling.yarn_log_multiplier", -1.0, "{}.rope.scaling.yarn_log_multiplier is -1.0: it must be a number"),
        ("nextn_predict_layers", 2, "{}.nextn_predict_layers=2 leaves none of the layers ({}.block_count)"),
        ("nextn_predict_layers", 0.5, "metadata key {}.nextn_predict_layers is 0.5: it must be a whole number, or 0"),
        ("block_count", 2**32 - 1, "{}.block_count=4294967295, but there are"),
        ("expert_gating_func", 4, "metadata key {}.expert_gating_func is 4: it must be 1 for softmax or 2 for sigmoid"),
        ("expert_weights_norm", 1, "metadata key {}.expert_weights_norm is 1: it must be true or false"),
        ("expert_used_count", 9, "metadata key {}.expert_used_count is 9: there are only 8 experts"),
        ("expert_group_count", 3, "8 experts cannot form 3 equal groups with 3 of them used ({}.expert_group_count"),
        ("expert_group_used_count", 2, "8 experts cannot form 1 equal groups with 2 of them used ("),
        ("expert_weights_scale", 0.0, "metadata key {}.expert_weights_scale is 0.0: it must be a number above 0"),
    ],
)  # fmt: skip
def test_a_header_that_asks_for_something_else_is_refused_with_the_key(
    architecture: str, key: str, value: Any, reason: str, tmp_path: Path
) -> None:
    reasons = unmet(tmp_path, architecture, {key: value})

    assert any(reason.format(architecture, architecture) in line for line in reasons), reasons


def test_fewer_experts_in_the_groups_used_than_are_needed_is_a_reason(tmp_path: Path) -> None:
    keys = {"expert_used_count": 3, "expert_group_count": 4, "expert_group_used_count": 1}

    assert unmet(tmp_path, "deepseek2", keys) == [
        "metadata key deepseek2.expert_used_count is 3: "
        "1 groups (deepseek2.expert_group_used_count) have only 2 experts"
    ]


@pytest.mark.parametrize("key", ["count", "sinkhorn_iterations", "epsilon"])
def test_streams_that_a_header_does_not_describe_are_a_reason(key: str, tmp_path: Path) -> None:
    reasons = unmet(tmp_path, "xing4_0", {f"hyper_connection.{key}": 0})

    assert reasons[0].startswith(f"metadata key xing4_0.hyper_connection.{key} is 0: it must be")


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize(
    "name", ["blk.0.attn_k_b.weight", "blk.1.attn_kv_a_norm.weight", "blk.0.ffn_up.weight", "blk.1.ffn_up_shexp.weight"]
)
def test_a_missing_tensor_is_named(architecture: str, name: str, tmp_path: Path) -> None:
    assert unmet(tmp_path, architecture, **{name: None}) == [f"missing tensors: {name}"]


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("name", ["blk.0.attn_kv_b.weight", "blk.0.exp_probs_b.bias", "blk.1.ffn_up.weight"])
def test_a_tensor_that_would_be_ignored_is_a_reason(architecture: str, name: str, tmp_path: Path) -> None:
    reasons = unmet(tmp_path, architecture, **{name: np.zeros(8, np.float32)})

    assert reasons == [f"tensors the family does not know: {name}"]


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_tensor_of_another_shape_is_named_with_both(architecture: str, tmp_path: Path) -> None:
    not_transposed = {"blk.0.attn_k_b.weight": np.zeros((4, 16, 32), np.float32)}

    assert unmet(tmp_path, architecture, **not_transposed) == [
        "tensor blk.0.attn_k_b.weight has shape (4, 16, 32), expected (4, 32, 16)"
    ]


def test_streams_without_their_weights_are_a_reason(tmp_path: Path) -> None:
    names = ["blk.1.hc_attn_fn.weight", "blk.1.hc_ffn_base.weight"]

    assert unmet(tmp_path, "xing4_0", **dict.fromkeys(names)) == [f"missing tensors: {', '.join(names)}"]


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_layer_that_predicts_further_tokens_is_known_and_left_alone(architecture: str, tmp_path: Path) -> None:
    keys = {"block_count": 3, "nextn_predict_layers": 1}
    header = HeaderReader(TinyFamily(architecture, keys=keys).metadata(), architecture)
    family: Any = import_module(f"pocketllm.engine.models.families.{architecture.replace('-', '_')}")
    _, optional = family.tensor_shapes(family.read_shape(header, 512))
    more = {name: np.zeros(shape, np.float32) for name, shape in optional.items() if name.startswith("blk.2.")}
    assert {"blk.2.nextn.eh_proj.weight", "blk.2.attn_k_b.weight", "blk.2.ffn_down_exps.weight"} <= set(more)
    spec = TinyFamily(architecture, keys=keys, tensors=more)
    with open_checkpoint(write_family(tmp_path / "tiny.gguf", spec)) as checkpoint:
        assert find_family(architecture).unmet(checkpoint) == []
        model: Any = find_family(architecture).load(checkpoint, select_backend("reference").ops, 64)

    assert len(model.layers) == 2


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_backend_without_latent_attention_is_named_with_what_it_lacks(architecture: str, tmp_path: Path) -> None:
    plain = CAPABILITY.ops | find_family("qwen3moe").capability.required_ops
    reasons = unmet_capabilities(EngineOptions(), find_family(architecture), replace(CAPABILITY, ops=plain), {})

    assert f"has no op latent_attention, which family {architecture} needs" in " ".join(reasons)


# -- glm-dsa's indexer -------------------------------------------------------------------------------------------------
TYPES = "attention.indexer.types"


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        (TYPES, [1, 2], "metadata key glm-dsa.attention.indexer.types is [1, 2]: it must say true or false"),
        (TYPES, [False, True], "metadata key glm-dsa.attention.indexer.types is [False, True]: it must say true or"),
        (TYPES, [True], "metadata key glm-dsa.attention.indexer.types is [True]: it must say true or false for each"),
        ("attention.indexer.key_length", 8, "glm-dsa.attention.indexer.key_length=8 must be at least"),
        ("attention.indexer.top_k", 0, "metadata key glm-dsa.attention.indexer.top_k is 0: it must be a whole number"),
        ("attention.q_lora_rank", 0, "metadata key glm-dsa.attention.q_lora_rank is absent: the indexer needs it"),
    ],
)  # fmt: skip
def test_an_indexer_that_cannot_be_is_refused_with_the_key(key: str, value: Any, reason: str, tmp_path: Path) -> None:
    reasons = unmet(tmp_path, "glm-dsa", {key: value})

    assert reasons[0].startswith(reason), reasons


def test_a_layer_that_attends_what_another_picked_has_no_indexer_and_keeps_no_keys(tmp_path: Path) -> None:
    spec = TinyFamily("glm-dsa", keys={TYPES: [True, False]})
    assert find_family("glm-dsa").kv_spec(spec.metadata()) == SeveralCaches((LatentSpec(2, 48), LatentSpec(1, 32)))
    assert not [name for name in weights(spec) if name.startswith("blk.1.indexer")]

    ignored = replace(spec, tensors={"blk.1.indexer.proj.weight": np.zeros((16, 64), np.float32)})
    with open_checkpoint(write_family(tmp_path / "tiny.gguf", ignored)) as checkpoint:
        reasons = find_family("glm-dsa").unmet(checkpoint)
    assert reasons == ["tensors the family does not know: blk.1.indexer.proj.weight"]


# -- what scores and angles are multiplied by --------------------------------------------------------------------------
def shape_of(keys: dict[str, Any]) -> Any:
    header = HeaderReader(TinyFamily("xing4_0", keys=keys).metadata(), "xing4_0")
    found = read_latent_shape(header)
    assert header.problems == []
    return found


def test_yarn_with_a_log_multiplier_multiplies_scores_and_not_angles() -> None:
    shape = shape_of(OF_XING4)

    assert shape.scale == pytest.approx(0.0721688 * 2.0047397, rel=1e-6)
    assert shape.magnitude == 1.0


def test_yarn_without_one_multiplies_angles_and_not_scores() -> None:
    shape = shape_of({**OF_XING4, "rope.scaling.yarn_log_multiplier": None})

    assert shape.scale == pytest.approx(192**-0.5)
    assert shape.magnitude == pytest.approx(1.4158883)


def test_a_log_multiplier_without_yarn_multiplies_nothing() -> None:
    shape = shape_of({**OF_XING4, "rope.scaling.type": "none"})

    assert (shape.scale, shape.magnitude) == (pytest.approx(192**-0.5), 1.0)


def test_yarn_turns_fast_pairs_as_before_and_slow_ones_slower_by_the_factor() -> None:
    rope = shape_of(OF_XING4).rope
    kept = yarn_kept_share(rope)
    plain = 10000.0 ** (-np.arange(32) / 32)

    assert (kept[:11] == 1).all()
    assert (kept[23:] == 0).all()
    assert (np.diff(kept[10:24]) < 0).all()
    assert np.allclose(inverse_frequencies(rope), plain * kept + plain / 64 * (1 - kept), rtol=1e-6)


def test_the_trunk_alone_is_kept_in_the_cache() -> None:
    assert shape_of({"block_count": 41, "nextn_predict_layers": 1}).kv == LatentSpec(40, 48)


def test_rows_that_rotate_are_taken_out_of_packed_rows_untouched(tmp_path: Path) -> None:
    spec = TinyFamily("deepseek2", seed=4)
    with open_checkpoint(write_family(tmp_path / "tiny.gguf", spec)) as checkpoint:
        model: Any = find_family("deepseek2").load(checkpoint, select_backend("reference").ops, 64)
    rows = weights(spec)["blk.0.attn_q_b.weight"].reshape(4, 32, 48)
    attention = model.layers[0].attention

    assert np.array_equal(attention.q_nope.weight.numpy(), rows[:, :16].reshape(64, 48))
    assert np.array_equal(attention.q_rope.weight.numpy(), rows[:, 16:].reshape(64, 48))
