"""`--batch-invariant`: a request's bits are its own, in any company, however it is cut into steps and cached; whatever
cannot promise that refuses."""

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pocketllm import LLM, SamplingParams
from pocketllm.engine.backends.api.attention import ForwardBatch
from pocketllm.engine.backends.api.capability import BackendOptions
from pocketllm.engine.backends.api.device import read_facts
from pocketllm.engine.backends.cuda.device import INVARIANT_OPS, INVARIANT_WIDTH, OPS, declare
from pocketllm.engine.models.registry import find_family
from tests.cuda.interpreter import in_interpreter
from tests.native import needs_native
from tests.parity.drive import Driver
from tests.unit.test_plan import CAPABILITY, FakeFamily, plan, reasons

ORACLES = Path(__file__).parents[1] / "oracles"
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton-missing")
INVARIANT = replace(CAPABILITY, invariant_ops=CAPABILITY.ops)
APART = replace(INVARIANT, answers_apart=True)
PROMPT = [7 * n % 90 + 3 for n in range(37)]
PARAMS = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, logprobs=3)


# -- engines
@pytest.fixture(scope="module", params=["reference", pytest.param("cpu", marks=needs_native)])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=["llama", "qwen3_moe", "qwen3_5_text"])
def llm(request: pytest.FixtureRequest, backend: str) -> Iterator[LLM]:
    model = str(ORACLES / f"{request.param}.gguf")
    with LLM(model=model, backend=backend, threads=2, batch_invariant=True, block_size=8, max_model_len=64) as llm:
        yield llm


def answers(llm: LLM, prompts: list[list[int]], **params: Any) -> list[Any]:
    found = llm.generate(prompts, replace(PARAMS, **params))
    return [(one.token_ids, one.logprobs, one.prompt_logprobs) for one in found]


@settings(max_examples=6, deadline=None)
@given(
    company=st.lists(st.lists(st.integers(3, 90), min_size=1, max_size=20), max_size=5),
    chunk=st.integers(1, 40),
    is_scored=st.booleans(),
    is_cached=st.booleans(),
)
def test_an_answer_is_that_of_the_request_alone(
    llm: LLM, company: list[list[int]], chunk: int, is_scored: bool, is_cached: bool
) -> None:
    scored = {"prompt_logprobs": 2} if is_scored else {}
    [alone] = answers(LLM.from_engine(llm.engine.sibling(prefix_cache=False)), [PROMPT], **scored)
    other = LLM.from_engine(llm.engine.sibling(prefill_chunk=chunk, prefix_cache=is_cached))

    assert answers(other, [*company, PROMPT], **scored)[-1] == alone
    assert answers(other, [PROMPT, *company], **scored)[0] == alone


@needs_triton
@pytest.mark.parametrize("part", ["products", "attention", "mixtures", "llama"])
def test_bits_on_a_gpu_are_those_of_the_request_alone_and_without_the_option_they_are_not(part: str) -> None:
    answer = in_interpreter("tests.cuda.invariance", part, timeout_s=600)

    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "is invariant" in answer.stdout


@needs_triton
@pytest.mark.full
def test_answers_of_mixtures_windows_sinks_and_latents_on_a_gpu_are_those_of_the_request_alone() -> None:
    names = "qwen3_moe", "gemma3_text", "gpt_oss", "deepseek_v2"
    answer = in_interpreter("tests.cuda.invariance", *names, timeout_s=1800)

    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert answer.stdout.count("is invariant") == len(names)


@needs_triton
@pytest.mark.parametrize(("width", "kind"), [(128, "*fp16"), (96, "*fp16"), (96, "*bf16"), (72, "*fp32")])
def test_products_in_tiles_of_one_size_compile_for_a_gpu_whatever_the_width(width: int, kind: str) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pocketllm.engine.backends.cuda.kernels.fixed import HALF, PLAIN, fixed_kernel

    is_plain = kind == "*fp32"
    tile = PLAIN if is_plain else HALF
    constants = {"width": width, "IS_PLAIN": is_plain, **{name: tile[name] for name in ("ROWS", "COLS", "DEPTH")}}
    given = dict.fromkeys(fixed_kernel.arg_names, "i32") | {"x": kind, "w": kind, "y": "*fp32"}
    signature = {name: "constexpr" if name in constants else given[name] for name in given}
    source = ASTSource(fixed_kernel, signature, {(list(given).index(name),): constants[name] for name in constants})
    how = {name: tile[name] for name in ("num_warps", "num_stages")}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=how)

    assert ("wgmma" in compiled.asm["ptx"]) is not is_plain


# -- plans
def test_a_backend_that_does_not_promise_it_refuses_in_one_sentence() -> None:
    assert reasons(batch_invariant=True) == ("backend fake does not promise what --batch-invariant asks for",)
    assert plan(capability=INVARIANT).notes == ()


def test_a_plan_says_what_is_promised() -> None:
    [note] = plan(capability=INVARIANT, batch_invariant=True).notes
    also = plan(capability=APART, batch_invariant=True)

    assert note.startswith("batch-invariant: a request has the same bits in any company")
    assert "finds prompts again, not answers" in also.notes[1]
    assert also.limits.answers_apart
    assert not plan(capability=APART).limits.answers_apart


def test_a_family_is_refused_for_an_operation_whose_bits_depend_on_the_step() -> None:
    [reason] = reasons(FakeFamily(), replace(INVARIANT, invariant_ops=frozenset({"linear"})), batch_invariant=True)

    assert reason == (
        "backend fake gives embed, which family fake needs, other bits in other steps: leave out --batch-invariant"
    )


def test_a_step_wider_than_is_promised_is_refused_with_the_width_that_is() -> None:
    [reason] = reasons(capability=replace(INVARIANT, batch_invariant_width=256), batch_invariant=True)

    assert reason.endswith("max_num_batched_tokens is 512: set --max-num-batched-tokens 256")


def test_answers_that_may_be_recomputed_are_refused_where_they_would_have_other_bits() -> None:
    [reason] = reasons(capability=APART, batch_invariant=True, reserve=0.5)

    assert "leave out --reserve" in reason
    assert plan(capability=INVARIANT, batch_invariant=True, reserve=0.5).limits.reserve == 0.5


def test_a_gpu_promises_it_when_asked_and_then_has_numerics_of_its_own() -> None:
    facts = replace(read_facts(), gpus=("a GPU",))
    usual, asked = (declare(facts, BackendOptions(batch_invariant=is_asked)) for is_asked in (False, True))

    assert (usual.invariant_ops, usual.batch_invariant_width, usual.answers_apart) == (frozenset(), 1, False)
    assert (asked.invariant_ops, asked.batch_invariant_width, asked.answers_apart) == (
        INVARIANT_OPS, INVARIANT_WIDTH, True,
    )  # fmt: skip
    assert asked.numerics_version == f"{usual.numerics_version}-invariant"


@pytest.mark.parametrize(
    ("architecture", "is_promised"),
    [
        *((name, True) for name in ("llama", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "gemma4", "gpt-oss")),
        *((name, True) for name in ("smollm3", "olmo2", "mimo2", "minimax-m2", "deepseek2")),
        *((name, False) for name in ("glm-dsa", "lfm2", "qwen35", "qwen3next", "qwen4exp", "xing4_0")),
    ],
)
def test_which_families_a_gpu_promises_it_for(architecture: str, is_promised: bool) -> None:
    capability = find_family(architecture).capability
    needed = capability.required_ops.union(*capability.ops_of_keys.values())

    assert needed <= OPS
    assert (needed <= INVARIANT_OPS) is is_promised


# -- steps in parts
def step(counts: list[int], is_answer: list[bool]) -> ForwardBatch:
    """A step over a model with windows, of sequences that begin with it; an even number of tokens wants all logits."""
    driver = Driver(ORACLES / "gemma3_text.gguf")
    prompts = [list(range(10 * number, 10 * number + 10)) for number in range(len(counts))]
    batch = driver.batch(prompts, list(enumerate(counts)))
    ends = batch.query_start_loc[1:]
    rows = [row for end, count in zip(ends, counts, strict=True) for row in range(end - (count % 2 or count), end)]
    return replace(batch, logit_rows=np.array(rows, np.int32), answers=np.array(is_answer, np.bool_))


@needs_triton
def test_a_step_is_cut_into_answers_and_prompts_that_are_whole_steps_themselves() -> None:
    from pocketllm.engine.backends.cuda.steps.kinds import parts_of

    counts, is_answer = [1, 4, 1, 3, 1], [True, False, False, False, True]
    whole = step(counts, is_answer)
    (answers, of_answers), (prompts, of_prompts) = parts_of(whole)

    assert answers.input_ids.tolist() == [0, 40]
    assert prompts.input_ids.tolist() == [10, 11, 12, 13, 20, 30, 31, 32]
    assert prompts.query_start_loc.tolist() == [0, 4, 5, 8]
    assert prompts.seq_lens.tolist() == [4, 1, 3]
    assert prompts.logit_rows.tolist() == [0, 1, 2, 3, 4, 7]
    assert (of_answers.tolist(), of_prompts.tolist()) == ([0, 7], [1, 2, 3, 4, 5, 6])
    for part, seqs, tokens in ((answers, [0, 4], [0, 9]), (prompts, [1, 2, 3], list(range(1, 9)))):
        for name in ("block_table", "window_table"):
            assert np.array_equal(getattr(part, name), getattr(whole, name)[seqs]), name
        for name in ("positions", "slot_mapping", "window_slots"):
            assert np.array_equal(getattr(part, name), getattr(whole, name)[tokens]), name


@needs_triton
def test_more_answers_than_a_captured_step_has_are_several_steps() -> None:
    from pocketllm.engine.backends.cuda.steps.kinds import parts_of

    parts = list(parts_of(step([1] * 70, [True] * 70)))

    assert [part.num_seqs for part, _ in parts] == [32, 32, 6]
    assert np.concatenate([rows for _, rows in parts]).tolist() == list(range(70))


@needs_triton
def test_a_piece_of_a_prompt_is_attended_as_prompts_are_however_short_it_is() -> None:
    from pocketllm.engine.backends.cuda.steps.batch import sizes_of

    told, untold = (sizes_of(step([1, 1], kinds)) for kinds in ([True, False], []))

    assert (told.singles, told.tiles) == (1, 1)
    assert (untold.singles, untold.tiles) == (2, 0)
