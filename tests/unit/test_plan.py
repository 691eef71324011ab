import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pocketllm.engine.backends.api.capability import BackendBid, BackendCapability, StepSizes
from pocketllm.engine.models.contract import KVSpec, ModelCapability
from pocketllm.engine.options import EngineOptions
from pocketllm.engine.plan import backend_options, make_plan, plan_first
from pocketllm.engine.plan.memory import Demand, Scratch, plan_memory
from pocketllm.engine.plan.sizes import SizedOptions
from pocketllm.errors import OptionError, UnsupportedFeatureError

MIB = 1 << 20
CAPABILITY = BackendCapability(
    name="fake",
    device="cpu",
    device_name="a fake processor",
    isa=None,
    threads=2,
    activation_dtype="float32",
    kv_dtype="float32",
    ops=frozenset({"embed", "linear"}),
    quant_types=frozenset({"F32", "Q4_0"}),
    weight_bytes_per_element={"F32": 4.0, "Q4_0": 4.0},
    kv_element_bytes=4,
    kv_scale_bytes=0,
    attention_scratch_bytes=0,
    batch_invariant_width=1024,
    memory_bytes=64 * MIB,
    numerics_version="fake-1",
)


@dataclass(frozen=True)
class FakeTensor:
    name: str
    shape: tuple[int, ...]
    quant_type: str
    num_bytes: int


@dataclass(frozen=True)
class FakeCheckpoint:
    tensors: Mapping[str, FakeTensor]
    metadata: Mapping[str, Any] = field(default_factory=lambda: {"general.architecture": "fake"})

    def data(self, name: str) -> Any:
        raise AssertionError("a plan reads no weight")

    values = data


@dataclass(frozen=True)
class FakeFamily:
    architecture: str = "fake"
    capability: ModelCapability = ModelCapability(required_ops=frozenset({"embed"}))  # noqa: RUF009  # frozen too
    context: int = 1024
    reasons: Sequence[str] = ()

    def kv_spec(self, metadata: Mapping[str, Any]) -> KVSpec:
        return KVSpec(num_layers=2, num_kv_heads=2, key_dim=64, value_dim=64)

    def context_length(self, metadata: Mapping[str, Any]) -> int:
        return self.context

    def unmet(self, checkpoint: Any) -> Sequence[str]:
        return self.reasons

    def load(self, checkpoint: Any, ops: Any, max_model_len: int) -> Any:
        raise AssertionError("a plan loads nothing")


def checkpoint(**quant_types: str) -> FakeCheckpoint:
    types = {"embed": "Q4_0", "norm": "F32", **quant_types}
    shapes = {name: (64,) if "norm" in name else (64, 64) for name in types}
    return FakeCheckpoint({n: FakeTensor(n, shapes[n], quant_type, 2304) for n, quant_type in types.items()})


def plan(
    family: FakeFamily | str = FakeFamily(),  # frozen
    capability: BackendCapability = CAPABILITY,
    tensors: FakeCheckpoint | None = None,
    **options: Any,
) -> Any:
    return make_plan(EngineOptions(**options), family, capability, tensors or checkpoint(), model="m")  # type: ignore[arg-type]  # a fake


def reasons(*args: Any, **kwargs: Any) -> tuple[str, ...]:
    with pytest.raises(UnsupportedFeatureError) as caught:
        plan(*args, **kwargs)
    return caught.value.reasons


# -- what a plan says
def test_a_plan_says_what_will_run_and_what_it_costs() -> None:
    made = plan()

    assert (made.model, made.architecture, made.backend, made.device_name) == ("m", "fake", "fake", "a fake processor")
    assert made.quant_types == {"F32": {"tensors": 1, "bytes": 2304}, "Q4_0": {"tensors": 1, "bytes": 2304}}
    assert made.weights_bytes == 4 * (64 + 64 * 64)
    assert made.kv_bytes_per_token == 2 * 2 * 128 * 4
    assert made.limits.max_model_len == made.context_length == 1024
    assert made.kv_bytes == 8 * 1024 * 2048 == made.limits.num_blocks * 16 * 2048
    assert made.notes == ()


def test_a_plan_is_json_with_every_option_and_its_source() -> None:
    made = plan(max_num_seqs=2).as_dict()

    assert json.loads(json.dumps(made)) == made
    assert made["max_num_seqs"] == made["options"]["max_num_seqs"] == 2
    assert made["num_blocks"] == 128


def test_a_plan_names_the_model_and_not_where_it_lies() -> None:
    assert plan(model="/home/me/secret/m.gguf").as_dict()["options"]["model"] == "m"
    assert "secret" not in json.dumps(plan(model="/home/me/secret/m.gguf").as_dict())


def test_packed_weights_take_what_they_take_in_the_file_and_vectors_are_float32() -> None:
    assert plan(capability=replace(CAPABILITY, weight_bytes_per_element={})).weights_bytes == 4 * 64 + 2304


def test_a_step_wider_than_the_invariant_width_is_noted() -> None:
    [note] = plan(capability=replace(CAPABILITY, batch_invariant_width=1)).notes

    assert "512 rows" in note
    assert "up to 1" in note


def test_a_cache_for_fewer_full_requests_than_the_width_is_noted() -> None:
    [note] = plan(kv_cache_bytes=3 * 1024 * 2048).notes

    assert "3 requests" in note


def test_working_memory_grows_with_the_longest_request_and_is_refused_when_it_is_not_there() -> None:
    scores = replace(CAPABILITY, attention_scratch_bytes=4)

    assert plan(capability=scores).scratch_bytes - plan().scratch_bytes == 4 * 256 * 1024
    assert plan(capability=scores, max_model_len=512).scratch_bytes < plan(capability=scores).scratch_bytes
    [reason] = reasons(FakeFamily(context=1 << 16), replace(scores, attention_scratch_bytes=64))
    fitting = int(reason.rsplit("--max-model-len ", 1)[1].split()[0])
    assert plan(
        FakeFamily(context=1 << 16), replace(scores, attention_scratch_bytes=64), max_model_len=fitting, max_num_seqs=1
    )


# -- which backend
def test_auto_takes_the_first_backend_that_can_run_the_checkpoint_and_says_what_was_wrong_with_the_others() -> None:
    offers = [
        BackendBid("quick", replace(CAPABILITY, name="quick", quant_types=frozenset({"F32"})), "yes"),
        BackendBid("fake", CAPABILITY, "yes"),
        BackendBid("absent", None, "no such card"),
    ]
    made, notes = plan_first(EngineOptions(), FakeFamily(), offers, checkpoint(), model="m")  # type: ignore[arg-type]  # fakes

    assert made.backend == "fake"
    assert made.notes == tuple(notes)
    assert "backend auto chose fake (quick: backend quick cannot decode quant type Q4_0" in notes[0]
    assert "absent: no such card" in notes[0]


def test_what_no_backend_could_change_is_told_alone() -> None:
    offers = [BackendBid("fake", CAPABILITY, ""), BackendBid("absent", None, "no such card")]
    with pytest.raises(UnsupportedFeatureError) as caught:
        plan_first(EngineOptions(max_model_len=1025), FakeFamily(), offers, checkpoint(), model="m")  # type: ignore[arg-type]  # fakes

    assert len(caught.value.reasons) == 1
    assert "max_model_len=1025 is longer" in caught.value.reasons[0]


def test_when_no_backend_can_run_a_checkpoint_the_reasons_of_all_are_told_once() -> None:
    poor = replace(CAPABILITY, quant_types=frozenset())
    offers = [
        BackendBid("a", replace(poor, name="a"), ""),
        BackendBid("b", replace(poor, name="b"), ""),
        BackendBid("c", None, "no"),
    ]
    with pytest.raises(UnsupportedFeatureError) as caught:
        plan_first(EngineOptions(), FakeFamily(reasons=["no rope"]), offers, checkpoint(), model="m")  # type: ignore[arg-type]  # fakes

    assert [reason.split(" cannot")[0] for reason in caught.value.reasons] == [
        "no rope",
        "backend a",
        "backend b",
        "backend c: no",
    ]


# -- every reason why not
def test_a_type_that_only_another_backend_decodes_is_refused_with_what_to_do() -> None:
    (known,) = reasons(tensors=checkpoint(a="FP8"))
    (unknown,) = reasons(tensors=checkpoint(a="I64"))

    assert known.startswith("backend fake cannot decode quant type FP8 (1 tensors, such as a)")
    assert known.endswith("it decodes F32, Q4_0: take --backend reference, which decodes this one")
    assert unknown.endswith("it decodes F32, Q4_0")


def test_all_reasons_are_given_at_once() -> None:
    found = reasons(
        FakeFamily(capability=ModelCapability(frozenset({"embed", "mla"}), max_num_seqs=1), reasons=["no rope"]),
        tensors=checkpoint(a="Q9_X", b="Q9_X", c="IQ7"),
    )

    assert len(found) == 5
    assert found[0] == "no rope"
    assert "IQ7" in found[1]
    assert "such as c" in found[1]
    assert "Q9_X (2 tensors, such as a)" in found[2]
    assert "no op mla" in found[3]
    assert "at most 1 requests" in found[4]


def test_an_unknown_architecture_is_told_with_what_else_is_wrong() -> None:
    found = reasons("no model family 'foo'; known: llama", tensors=checkpoint(a="Q9_X"))

    assert found[0] == "no model family 'foo'; known: llama"
    assert "Q9_X" in found[1]


def test_a_vector_may_be_of_a_plain_type_that_no_matrix_has() -> None:
    assert plan(tensors=checkpoint(norm="BF16")).architecture == "fake"
    assert "BF16" in reasons(tensors=checkpoint(embed="BF16"))[0]


def test_a_context_longer_than_the_checkpoints_is_refused() -> None:
    [reason] = reasons(max_model_len=1025)

    assert "1025" in reason
    assert "1024" in reason


def test_a_cache_too_small_for_one_request_is_refused() -> None:
    [reason] = reasons(kv_cache_bytes=1024 * 2048 - 1)

    assert "fewer than one request of max_model_len=1024" in reason
    assert str(1024 * 2048) in reason


def test_memory_that_is_not_there_is_refused_with_a_length_that_fits() -> None:
    [reason] = reasons(FakeFamily(context=1 << 20))

    assert "of 0.06 GiB available" in reason
    fitting = int(reason.rsplit("--max-model-len ", 1)[1].split()[0])
    assert plan(FakeFamily(context=1 << 20), max_model_len=fitting).limits.max_model_len == fitting
    assert reasons(FakeFamily(context=1 << 20), max_model_len=fitting + 16)


def test_a_length_that_would_fit_is_never_beyond_the_context() -> None:
    found = reasons(max_model_len=1 << 40)

    assert found[0].endswith("lower --max-model-len")
    assert found[1].endswith("set --max-model-len 1024 or lower")


def test_a_cache_beyond_memory_is_refused_with_a_size_that_fits() -> None:
    [reason] = reasons(kv_cache_bytes=1 << 50)

    fitting = int(reason.rsplit("--kv-cache-bytes ", 1)[1].split()[0])
    assert plan(kv_cache_bytes=fitting)


def test_a_block_beyond_memory_is_not_blamed_on_the_checkpoint() -> None:
    [reason] = reasons(block_size=1 << 40)

    assert reason.endswith("lower --block-size")


def test_a_reason_that_not_all_backends_have_says_whose_it_is() -> None:
    small = replace(CAPABILITY, name="small", memory_bytes=1000)
    offers = [BackendBid("fake", CAPABILITY, ""), BackendBid("small", small, "")]

    with pytest.raises(UnsupportedFeatureError) as caught:
        plan_first(EngineOptions(max_model_len=1025), FakeFamily(), offers, checkpoint(), model="m")  # type: ignore[arg-type]  # fakes

    assert [reason.split()[0] for reason in caught.value.reasons] == ["max_model_len=1025", "on"]
    assert caught.value.reasons[1].startswith("on small: weights")


def test_weights_alone_too_large_ask_for_a_smaller_checkpoint() -> None:
    [reason] = reasons(capability=replace(CAPABILITY, memory_bytes=1000))

    assert "smaller checkpoint" in reason


def test_steps_too_large_for_the_memory_ask_for_smaller_ones() -> None:
    [reason] = reasons(max_num_batched_tokens=1 << 40, capability=replace(CAPABILITY, memory_bytes=1 << 30))

    assert reason.endswith("available: lower --max-num-batched-tokens or --max-num-seqs")


def test_memory_that_cannot_be_read_refuses_nothing() -> None:
    made = plan(FakeFamily(context=1 << 20), capability=replace(CAPABILITY, memory_bytes=None))

    assert made.limits.max_model_len == 1 << 20


@pytest.mark.parametrize(
    ("capability", "needed"),
    [
        (ModelCapability(frozenset()), "int16"),
        (ModelCapability(frozenset(), wide=frozenset({"output"})), "int16"),
        (ModelCapability(frozenset(), activation_bits=8, wide=frozenset({"output"})), "mixed"),
        (ModelCapability(frozenset(), activation_bits=8), "int8"),
    ],
)
def test_a_backend_is_asked_for_the_activations_that_the_family_needs(capability: ModelCapability, needed: str) -> None:
    wishes = backend_options(EngineOptions(), FakeFamily(capability=capability))  # type: ignore[arg-type]  # a fake

    assert (wishes.activation_dtype, wishes.least_activations) == (None, needed)
    assert backend_options(EngineOptions(), "no family").least_activations == "int8"


@pytest.mark.parametrize(("asked", "is_noted"), [("int8", True), ("mixed", True), ("int16", False), (None, False)])
def test_activations_narrower_than_the_family_needs_are_noted(asked: str | None, is_noted: bool) -> None:
    note = f"family fake needs activations of 16 bits to pick what exact ones pick, not {asked}"
    forgiving = FakeFamily(capability=ModelCapability(frozenset({"embed"}), activation_bits=8))

    assert plan(activation_dtype=asked).notes == ((note,) if is_noted else ())
    assert plan(forgiving, activation_dtype=asked).notes == ()


def test_a_family_that_cannot_split_a_prompt_says_so() -> None:
    whole = ModelCapability(frozenset(), supports_chunked_prefill=False)

    assert "cannot split a prompt" in reasons(FakeFamily(capability=whole))[0]
    assert plan(FakeFamily(capability=whole), prefill_chunk=512).limits.prefill_chunk == 512


@given(
    st.integers(1, 4096),
    st.integers(1, 16),
    st.integers(1, 64),
    st.integers(1, 10_000),
    st.integers(0, 1 << 30),
    st.one_of(st.none(), st.integers(0, 1 << 32)),
    st.builds(Scratch, st.integers(0, 1 << 24), st.integers(0, 1 << 12)),
)
def test_an_accepted_memory_plan_holds_one_full_request_within_memory(
    context: int,
    max_num_seqs: int,
    block_size: int,
    per_token: int,
    weights: int,
    available: int | None,
    scratch: Scratch,
) -> None:
    options = SizedOptions(max_num_seqs=max_num_seqs, block_size=block_size)
    memory = plan_memory(options, context, Demand(weights, per_token, scratch=scratch), available)

    assert memory.max_model_len == context
    assert memory.num_blocks * block_size >= context
    used = weights + memory.num_blocks * block_size * per_token + scratch.of(context)
    assert bool(memory.reasons) == (available is not None and used > available)


# -- sizes that were not said
LARGE = replace(CAPABILITY, sizes=StepSizes(16, 2048, 1024, kv_cache_bytes=8 * 1024 * 2048), memory_bytes=1 << 30)


def test_sizes_that_were_not_said_are_the_backend_s_own() -> None:
    limits = plan(capability=LARGE).limits

    assert (limits.max_num_seqs, limits.max_num_batched_tokens, limits.prefill_chunk) == (16, 2048, 1024)
    assert plan(capability=LARGE).kv_bytes == 8 * 1024 * 2048
    assert plan(capability=LARGE).options["prefill_chunk"] == 1024


def test_sizes_that_were_said_stay_as_they_were_said() -> None:
    made = plan(capability=LARGE, max_num_seqs=3, prefill_chunk=64, kv_cache_bytes=16 * 1024 * 2048)

    assert (made.limits.max_num_seqs, made.limits.max_num_batched_tokens, made.limits.prefill_chunk) == (3, 2048, 64)
    assert made.kv_bytes == 16 * 1024 * 2048


def test_a_budget_that_was_not_said_has_a_token_for_each_request() -> None:
    assert plan(capability=LARGE, max_num_seqs=4096, kv_cache_bytes=1024 * 2048).limits.max_num_batched_tokens == 4096
    with pytest.raises(OptionError, match=r"max_num_batched_tokens=8 .* is below max_num_seqs=16"):
        plan(capability=LARGE, max_num_batched_tokens=8)


# -- the real thing
def test_a_plan_of_a_real_checkpoint_needs_its_header_only(tiny_gguf: Path) -> None:
    from pocketllm.engine.backends import select
    from pocketllm.engine.models.registry import find_family
    from pocketllm.engine.weights.checkpoint import open_checkpoint

    capability = select.offers("reference")[0].capability
    assert capability is not None
    made = make_plan(EngineOptions(), find_family("llama"), capability, open_checkpoint(tiny_gguf))

    assert made.architecture == "llama"
    assert made.backend == "reference"
    assert made.weights_bytes > 0
