"""Words of 1000 random strings, cut as llama.cpp cuts them, for every pre type; where it approximates, as another regex
engine cuts them.

The strings (seed 7, 16 scripts, white space of all kinds, marks, digits, emoji) and the answers are in
`oracles/text/pre_fuzz.npz`: a CRC-32 for each string, of the ids that llama.cpp gave with the vocabulary of
`pre_types.json`, whose merges cross the borders of words, so that every border shows.
"""

import json
import unicodedata
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pocketllm.engine.text.pretokenizers import PRE_TOKENIZERS
from pocketllm.engine.text.tokenizer import Tokenizer

TEXT = Path(__file__).parent.parent / "oracles" / "text"
FUZZ = np.load(TEXT / "pre_fuzz.npz")
STRINGS = bytes(FUZZ["strings"]).decode().split("\0")
ANSWERS: dict[str, str] = json.loads(str(FUZZ["answers"]))
VOCABULARY: dict[str, Any] = json.loads((TEXT / "pre_types.json").read_text())
NUM_APPROXIMATED = {
    "deepseek-llm": 8,
    "deepseek-coder": 7,
    **dict.fromkeys(("minimax-m2", "kanana2", "gpt-4o", "llama4", "tekken"), 1),
    "kimi-k2": 4,
}
"""How many of the strings llama.cpp cuts otherwise than the published patterns do: decision 22 says why."""
NOT_IN_LLAMA_CPP = {"llama3-bpe"}


def digests_of_ids(pre: str) -> np.ndarray[Any, Any]:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": VOCABULARY["tokens"],
        "tokenizer.ggml.merges": VOCABULARY["merges"],
        "tokenizer.ggml.add_bos_token": False,
    }
    tokenizer = Tokenizer.from_metadata(metadata)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of bytes that this vocabulary lacks
        return np.array([zlib.crc32(np.array(tokenizer.encode(text), "<i4").tobytes()) for text in STRINGS])


def one_of_each_kind() -> list[str]:
    """A pre type for each different way to cut; the others name the same patterns."""
    kinds = {(entry.splits, ANSWERS.get(name)): name for name, entry in reversed(PRE_TOKENIZERS.items())}
    return sorted(set(kinds.values()) - NOT_IN_LLAMA_CPP)


def test_every_pre_type_has_an_answer_of_llama_cpp() -> None:
    assert set(PRE_TOKENIZERS) == set(ANSWERS) | NOT_IN_LLAMA_CPP
    assert len(STRINGS) == 1000


@pytest.mark.parametrize("pre", one_of_each_kind())
def test_a_thousand_random_strings_get_the_ids_of_llama_cpp(pre: str) -> None:
    differing = np.flatnonzero(digests_of_ids(pre) != FUZZ[ANSWERS[pre]])

    assert len(differing) == NUM_APPROXIMATED.get(pre, 0), [STRINGS[index] for index in differing]


@pytest.mark.full
@pytest.mark.parametrize("pre", sorted(ANSWERS))
def test_every_name_of_a_pre_type_gets_the_ids_of_llama_cpp(pre: str) -> None:
    differing = np.flatnonzero(digests_of_ids(pre) != FUZZ[ANSWERS[pre]])

    assert len(differing) == NUM_APPROXIMATED.get(pre, 0)


@pytest.mark.parametrize("pre", ["deepseek-llm", "deepseek-coder", "minimax-m2", "tekken", "kimi-k2"])
def test_where_llama_cpp_approximates_another_engine_cuts_the_same_words(pre: str) -> None:
    from tokenizers import Regex, pre_tokenizers

    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[pre].splits]
    sequence = pre_tokenizers.Sequence(splits)
    words = (sequence.pre_tokenize_str(text) for text in STRINGS)
    digests = [zlib.crc32("\0".join(word for word, _ in found).encode()) for found in words]

    assert np.array_equal(np.array(digests), FUZZ[f"cut {pre}"])


@pytest.mark.parametrize("pre", ["deepseek-llm", "deepseek-coder", "minimax-m2", "tekken"])
def test_llama_cpp_differs_only_at_marks_and_at_white_space_outside_ascii(pre: str) -> None:
    def is_cause(char: str) -> bool:
        if pre.startswith("deepseek"):
            return char > "\x7f" and char.isspace()
        return unicodedata.category(char).startswith("M")

    differing = np.flatnonzero(digests_of_ids(pre) != FUZZ[ANSWERS[pre]])

    assert all(any(map(is_cause, STRINGS[index])) for index in differing)
