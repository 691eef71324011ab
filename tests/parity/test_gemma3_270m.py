"""Gemma 3 270M, live, against what transformers and sentencepiece said of the same file."""

import json
from pathlib import Path

import numpy as np
import pytest

from pocketllm.engine.text.tokenizer import Tokenizer
from pocketllm.engine.weights.checkpoint import open_checkpoint
from tests.native import cpu_ops
from tests.parity.compare import log_softmax
from tests.parity.drive import Driver, chunks
from tests.parity.record import nll

ORACLES = Path(__file__).parents[1] / "oracles"
pytestmark = [pytest.mark.model, pytest.mark.full]


@pytest.fixture(scope="module")
def tokenizer(gemma3_270m: Path) -> Tokenizer:
    with open_checkpoint(gemma3_270m) as checkpoint:
        return Tokenizer.from_metadata(checkpoint.metadata)


def test_its_likeliest_tokens_and_the_texts_likelihood_are_those_of_transformers(gemma3_270m: Path) -> None:
    oracle = np.load(ORACLES / "gemma3_270m_top5.npz")
    ids = oracle["input_ids"]
    [logits] = Driver(gemma3_270m, threads=None).run([ids.tolist()], chunks(512, 200))
    ours = log_softmax(logits[::4])

    assert np.abs(np.take_along_axis(ours, oracle["top_ids"], axis=-1) - oracle["top_logprobs"]).max() < 1e-3
    clear = oracle["top_logprobs"][:, 0] - oracle["top_logprobs"][:, 1] > 1e-3
    assert clear.sum() > 120
    assert np.array_equal(ours.argmax(-1)[clear], oracle["top_ids"][clear, 0])
    assert nll(logits, ids) == pytest.approx(float(oracle["nll"]), rel=1e-4)


def test_the_native_backend_with_int8_keeps_nearly_every_likeliest_token_and_the_texts_likelihood(
    gemma3_270m: Path,
) -> None:
    oracle = np.load(ORACLES / "gemma3_270m_top5.npz")
    ids = oracle["input_ids"]
    [logits] = Driver(gemma3_270m, ops=cpu_ops(2)).run([ids.tolist()], chunks(512, 200))
    same = logits[::4].argmax(-1) == oracle["top_ids"][:, 0]
    lead = oracle["top_logprobs"][:, 0] - oracle["top_logprobs"][:, 1]

    assert same.mean() >= 0.98
    assert (lead[~same] <= 0.1).all()
    assert nll(logits, ids) == pytest.approx(float(oracle["nll"]), rel=5e-3)


def test_six_hundred_random_texts_become_the_ids_of_sentencepiece(tokenizer: Tokenizer) -> None:
    cases = json.loads((ORACLES / "text" / "gemma3_270m.json").read_text())["cases"]

    assert len(cases) == 600
    for case in cases:
        assert tokenizer.encode(case["text"], add_special=False) == case["ids"], case["text"]


def test_its_texts_survive_the_round_trip(tokenizer: Tokenizer) -> None:
    for case in json.loads((ORACLES / "text" / "gemma3_270m.json").read_text())["cases"]:
        # the mark that stands for a space cannot be told from one
        assert tokenizer.decode(case["ids"]) == case["text"].replace("\u2581", " ")


def test_a_text_begins_with_bos_and_no_space_is_put_before_it(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("Hello world") == [2, 9259, 1902]
    assert tokenizer.decode([2, 9259, 1902]) == "Hello world"
