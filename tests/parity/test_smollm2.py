"""The default model, live, against what transformers said of the same weights (see transformers_oracle.py)."""

from pathlib import Path

import numpy as np
import pytest

from pocketllm.engine.text.tokenizer import Tokenizer
from tests.native import cpu_ops, family_ops
from tests.parity.compare import compare, in_pieces, log_softmax
from tests.parity.drive import Driver, chunks

ORACLES = Path(__file__).parents[1] / "oracles"
pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def driver(smollm2: Path) -> Driver:
    """With all cores: how threads share a product must not change a row either."""
    return Driver(smollm2, threads=None)


def test_its_likeliest_tokens_are_those_of_transformers(driver: Driver) -> None:
    oracle = np.load(ORACLES / "smollm2_top5.npz")
    driver.reset()
    [logits] = driver.run([oracle["input_ids"].tolist()], chunks(256, 256))
    ours = log_softmax(logits[::4])

    assert np.abs(np.take_along_axis(ours, oracle["top_ids"], axis=-1) - oracle["top_logprobs"]).max() < 1e-4
    clear = oracle["top_logprobs"][:, 0] - oracle["top_logprobs"][:, 1] > 1e-3
    assert clear.sum() > 60
    assert np.array_equal(ours.argmax(-1)[clear], oracle["top_ids"][clear, 0])


def test_the_native_backends_activations_turn_over_at_most_2_of_100_likeliest_tokens(smollm2: Path) -> None:
    text = (Path(__file__).parent / "alice.txt").read_text(encoding="utf-8")
    narrow = Driver(smollm2, ops=family_ops(smollm2, 2))
    ids = Tokenizer.from_metadata(narrow.checkpoint.metadata).encode(text)[:512]
    exact = Driver(smollm2, ops=cpu_ops(2, activation_dtype="float32", kv_dtype="float32"))
    [[got], [expected]] = (driver.run([ids], chunks(512, 256)) for driver in (narrow, exact))
    difference = compare(in_pieces(got, expected))

    assert difference.top1 >= 0.98
    assert difference.kl <= 7e-4


def test_prefill_in_chunks_and_decoding_beside_others_give_the_bits_of_one_prefill(driver: Driver) -> None:
    ids = np.load(ORACLES / "smollm2_top5.npz")["input_ids"].tolist()
    driver.reset()
    [whole] = driver.run([ids[:70]], chunks(70, 70))
    driver.reset()
    prompts = [ids[:70], ids[100:130], ids[150:171]]
    steps = [[(0, 33), (1, 26)], [(2, 21), (0, 33)], [(1, 1), (0, 1)], [(0, 1)], [(0, 2), (1, 3)]]
    beside_others = driver.run(prompts, steps)[0]

    assert np.array_equal(beside_others, whole)


def test_eight_concurrent_requests_give_the_tokens_and_logprobs_of_one_at_a_time(smollm2: Path) -> None:
    from pocketllm.engine.lifecycle.sampling.params import SamplingParams
    from pocketllm.engine.llm import LLM

    openings = [
        "The",
        "In a hole",
        "Once upon a time",
        "2 + 2 =",
        "def add(a, b):",
        "Dear Sir",
        "To be or",
        "It was a dark",
    ]
    prompts = [f"{opening} {'and so on ' * (3 * number)}" for number, opening in enumerate(openings)]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=2)
    with LLM(model=str(smollm2), max_model_len=256, prefill_chunk=32, max_num_batched_tokens=64) as llm:
        alone = [llm.generate([prompt], params)[0] for prompt in prompts]
        together = llm.generate(prompts, params)

    assert [result.token_ids for result in together] == [result.token_ids for result in alone]
    assert [result.logprobs for result in together] == [result.logprobs for result in alone]
    assert all(result.logprobs for result in together)
