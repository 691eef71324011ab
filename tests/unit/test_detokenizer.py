"""Incremental text equals the text of all ids, and a character is never cut."""

import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pocketllm.engine.text.detokenizer import Detokenizer
from pocketllm.engine.text.tokenizer import Tokenizer
from pocketllm.engine.weights.checkpoint import open_checkpoint

ORACLES = Path(__file__).parent.parent / "oracles"
REPLACEMENT = "\ufffd"


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return Tokenizer.from_metadata(open_checkpoint(ORACLES / "llama.gguf").metadata)


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    vocabulary = json.loads((ORACLES / "text" / "tiny_sp.json").read_text())["vocabulary"]
    metadata = {f"tokenizer.ggml.{name}": value for name, value in vocabulary.items()}
    return Tokenizer.from_metadata(metadata | {"tokenizer.ggml.model": "llama"})


def pieces(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("kind", ["bpe", "sentencepiece"])
@given(data=st.data(), skip_special=st.booleans(), continues=st.booleans())
@settings(max_examples=150, deadline=None)
def test_pushes_and_flush_joined_are_the_decoded_text(
    kind: str, data: st.DataObject, skip_special: bool, continues: bool, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    detokenizer = Detokenizer(tokenizer, skip_special, continues=continues)

    assert "".join(pieces(detokenizer, ids)) == tokenizer.decode(ids, skip_special=skip_special, continues=continues)


@pytest.mark.parametrize("kind", ["bpe", "sentencepiece"])
@given(text=st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=0x1FFFF, exclude_categories=["Cs"])))
@settings(max_examples=100, deadline=None)
def test_every_delta_of_a_real_text_is_whole(kind: str, text: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    deltas = pieces(Detokenizer(tokenizer), tokenizer.encode(text, add_special=False))

    assert sum(delta.count(REPLACEMENT) for delta in deltas) == text.count(REPLACEMENT)
    assert "".join(deltas).replace("\u2581", " ") == text.replace("\u2581", " ")


@pytest.mark.parametrize("skip_special", [True, False])
def test_an_id_past_the_vocabulary_has_no_text(bpe: Tokenizer, skip_special: bool) -> None:
    # a head may have more rows than the tokenizer has tokens, and every row can be drawn
    detokenizer = Detokenizer(bpe, skip_special)
    ids = bpe.encode("Hi", add_special=False)

    padded = pieces(detokenizer, [bpe.vocab_size, *ids, bpe.vocab_size + 7])

    assert padded == ["", *pieces(Detokenizer(bpe), ids)[:-1], "", ""]


def test_a_character_of_four_bytes_comes_out_with_its_last_byte(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("🙂", add_special=False)[-4:]

    assert [len(sentencepiece.token_bytes(token_id)) for token_id in ids] == [1, 1, 1, 1]
    assert pieces(Detokenizer(sentencepiece), ids) == ["", "", "", "🙂", ""]


def test_a_character_that_never_comes_whole_shows_at_the_flush(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("🙂", add_special=False)[-4:-1]

    assert pieces(Detokenizer(sentencepiece), ids) == ["", "", "", REPLACEMENT]


def test_bytes_that_cannot_become_a_character_show_as_soon_as_that_is_certain(sentencepiece: Tokenizer) -> None:
    first, second, *_ = sentencepiece.encode("🙂", add_special=False)[-4:]
    letter = next(i for i in range(sentencepiece.vocab_size) if sentencepiece.token_bytes(i) == b"a")

    assert pieces(Detokenizer(sentencepiece), [second]) == [REPLACEMENT, ""]
    assert pieces(Detokenizer(sentencepiece), [first, letter]) == ["", f"{REPLACEMENT}a", ""]


def test_the_first_space_goes_only_where_a_text_begins(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("the", add_special=False)

    assert "".join(pieces(Detokenizer(sentencepiece), ids)) == "the"
    assert "".join(pieces(Detokenizer(sentencepiece, continues=True), ids)) == " the"


def test_control_tokens_are_skipped_or_shown(bpe: Tokenizer) -> None:
    end = min(bpe.eos_token_ids)
    ids = [*bpe.encode("a"), end]

    assert "".join(pieces(Detokenizer(bpe), ids)) == "a"
    assert "".join(pieces(Detokenizer(bpe, skip_special=False), ids)) == "a" + bpe.token_text(end)


def test_a_token_costs_the_same_however_long_the_text_is(bpe: Tokenizer) -> None:
    detokenizer = Detokenizer(bpe)
    token_id = bpe.encode("a")[0]
    begin = time.process_time()
    for _ in range(100_000):
        detokenizer.push(token_id)

    assert time.process_time() - begin < 3.0  # 0.05 s on an idle machine; a quadratic one takes minutes
