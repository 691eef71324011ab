"""Tokenizers against llama.cpp and SentencePiece, and every way a header can be wrong."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pocketllm.engine.text.pretokenizers import PRE_TOKENIZERS
from pocketllm.engine.text.token_scanner import TokenScanner
from pocketllm.engine.text.tokenizer import Tokenizer
from pocketllm.engine.text.vocabulary import TokenType
from pocketllm.engine.weights.checkpoint import open_checkpoint
from pocketllm.errors import CheckpointError, PocketLLMError, RequestError, UnsupportedFeatureError

ORACLES = Path(__file__).parent.parent / "oracles"


def oracle(name: str) -> dict[str, Any]:
    return json.loads((ORACLES / "text" / name).read_text())  # type: ignore[no-any-return]  # the file's own form


SP = oracle("tiny_sp.json")
PRE = oracle("pre_types.json")


def sp_metadata(**changes: Any) -> dict[str, Any]:
    base = {f"tokenizer.ggml.{name}": value for name, value in SP["vocabulary"].items()}
    return base | {"tokenizer.ggml.model": "llama"} | {f"tokenizer.ggml.{k}": v for k, v in changes.items()}


def bpe_metadata(**changes: Any) -> dict[str, Any]:
    """A vocabulary of the bytes of ASCII letters and a few merges; ids 0 to 3 are not plain text."""
    tokens = [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<tool>",
        *"abcdefghijklmnopqrstuvwxyz<|>_\u0120",
        "ab",
        "abc",
    ]
    base: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3, 3, 3, 4, *[1] * (len(tokens) - 4)],
        "merges": ["a b", "ab c"],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (base | changes).items() if value is not None}


@pytest.fixture(scope="module")
def tiny_bpe() -> Tokenizer:
    return Tokenizer.from_metadata(open_checkpoint(ORACLES / "llama.gguf").metadata)


@pytest.fixture(scope="module")
def tiny_sp() -> Tokenizer:
    return Tokenizer.from_metadata(sp_metadata())


LOST_BYTES = pytest.mark.filterwarnings("ignore:the vocabulary has no token for byte")


@LOST_BYTES
def test_a_byte_level_vocabulary_agrees_with_llama_cpp(tiny_bpe: Tokenizer) -> None:
    cases = oracle("tiny_bpe.json")["cases"]

    assert [tiny_bpe.encode(case["text"]) for case in cases] == [case["ids"] for case in cases]


@LOST_BYTES
@pytest.mark.model
def test_smollm2_agrees_with_llama_cpp_and_is_made_fast(smollm2: Path) -> None:
    metadata = dict(open_checkpoint(smollm2).metadata)
    cases = oracle("smollm2.json")["cases"]
    import tokenizers  # noqa: F401  # its import is not what is measured

    begin = time.process_time()
    tokenizer = Tokenizer.from_metadata(metadata)
    made_s = time.process_time() - begin

    assert [tokenizer.encode(case["text"]) for case in cases] == [case["ids"] for case in cases]
    assert made_s < 1.0  # of processor time; 0.12 s on an idle machine
    assert {tokenizer.token_text(i) for i in tokenizer.eos_token_ids} == {"<|im_end|>", "<|endoftext|>"}


def test_a_sentencepiece_vocabulary_agrees_with_sentencepiece(tiny_sp: Tokenizer) -> None:
    without_prefix = Tokenizer.from_metadata(sp_metadata(add_space_prefix=False))
    for case in SP["cases"]:
        assert tiny_sp.encode(case["text"], add_special=False) == case["ids"], case["text"]
        assert without_prefix.encode(case["text"], add_special=False) == case["ids_no_prefix"], case["text"]


def test_sentencepiece_ids_decode_as_sentencepiece_decodes_them(tiny_sp: Tokenizer) -> None:
    for case in SP["decode"]:  # without U+FFFD: how many stand for bytes that are no character is each decoder's own
        assert tiny_sp.decode(case["ids"]) == case["text"]


def test_pieces_with_a_table_of_merges_are_joined_by_the_table() -> None:
    tokens, scores = SP["vocabulary"]["tokens"], SP["vocabulary"]["scores"]
    normal = {
        token: score
        for token, score, kind in zip(tokens, scores, SP["vocabulary"]["token_type"], strict=True)
        if kind == 1
    }
    merges = [
        f"{token[:cut]} {token[cut:]}"
        for token in sorted(normal, key=normal.__getitem__, reverse=True)
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    ]
    tokenizer = Tokenizer.from_metadata(sp_metadata(model="gemma4", merges=merges, scores=None))
    for case in SP["cases"]:
        assert tokenizer.encode(case["text"], add_special=False) == case["ids_no_prefix"], case["text"]

    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.merges is missing"):
        Tokenizer.from_metadata(sp_metadata(model="gemma4"))


@pytest.mark.parametrize("group", PRE["groups"], ids=lambda group: group["pre"][0])
def test_words_are_cut_as_llama_cpp_cuts_them_for_every_pre_type(group: Mapping[str, Any]) -> None:
    for pre in group["pre"]:
        tokenizer = Tokenizer.from_metadata(
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": pre,
                "tokenizer.ggml.tokens": PRE["tokens"],
                "tokenizer.ggml.merges": PRE["merges"],
                "tokenizer.ggml.add_bos_token": False,
            }
        )
        assert [tokenizer.encode(text) for text in PRE["strings"]] == group["ids"], pre


def test_every_pattern_of_every_pre_type_compiles() -> None:
    from tokenizers import Regex

    for pre in PRE_TOKENIZERS.values():
        assert isinstance(pre.splits, tuple)
        assert [Regex(pattern) for pattern in pre.splits]


def test_ignoring_merges_takes_a_word_that_is_a_token_whole() -> None:
    tokens = [*"abcd", "ab", "abcd"]
    metadata = bpe_metadata(tokens=tokens, token_type=None, merges=["a b"], bos_token_id=None, eos_token_id=None)
    ids = {
        pre: Tokenizer.from_metadata(metadata | {"tokenizer.ggml.pre": pre}).encode("abcd") for pre in ("gpt-2", "glm4")
    }

    assert ids == {"gpt-2": [4, 2, 3], "glm4": [5]}


# bytes 0xF1 to 0xF3 and a few control characters have no token in this vocabulary
@given(text=st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=0x1FFFF, exclude_categories=["Cs"])))
@settings(deadline=None)
def test_byte_level_text_survives_the_round_trip(tiny_bpe: Tokenizer, text: str) -> None:
    assert tiny_bpe.decode(tiny_bpe.encode(text)) == text


@given(text=st.text(alphabet=st.characters(exclude_characters="\u2581", exclude_categories=["Cs"]), max_size=60))
@settings(deadline=None)
def test_sentencepiece_text_survives_the_round_trip(tiny_sp: Tokenizer, text: str) -> None:
    assert tiny_sp.decode(tiny_sp.encode(text)) == text


def test_control_tokens_in_text_are_plain_text_unless_asked_for() -> None:
    tokenizer = Tokenizer.from_metadata(bpe_metadata())
    plain = tokenizer.encode("ab<|im_end|>", add_special=False)

    assert not any(tokenizer.is_special(i) for i in plain)
    assert tokenizer.decode(plain) == "ab<|im_end|>"
    assert tokenizer.encode("ab<|im_end|>c", add_special=False, parse_special=True)[1:] == [2, 6]


def test_user_defined_tokens_always_match() -> None:
    tokenizer = Tokenizer.from_metadata(bpe_metadata())

    assert tokenizer.encode("a<tool>b", add_special=False) == [4, 3, 5]


def test_of_two_spellings_at_one_place_the_longer_is_the_token() -> None:
    scanner = TokenScanner({"<a>": 1, "<a><b>": 2, "<b>": 3, "x<a>": 4})

    assert list(scanner.split("-<a><b><b>--<a>x<a><<b>")) == ["-", 2, 3, "--", 1, 4, "<", 3]


def test_without_byte_tokens_a_run_of_unknown_characters_is_one_unknown_token() -> None:
    """As SentencePiece does it."""
    changes = {"tokens": ["<unk>", "\u2581", "a"], "token_type": [2, 1, 1], "scores": [0.0, -1.0, -2.0]}

    assert Tokenizer.from_metadata(sp_metadata(**changes)).encode("axyza") == [1, 2, 0, 2]


@pytest.mark.parametrize("types", [{"token_type": None}, {"token_type": [3, 3, 4, 4, *[1] * 33]}])
def test_an_end_of_turn_token_is_control_even_where_the_header_forgot(types: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_metadata(bpe_metadata(**types))

    assert tokenizer.is_special(2)
    assert 2 not in tokenizer.encode("<|im_end|>", add_special=False)


def test_a_token_that_merging_could_make_is_not_made_when_it_is_control() -> None:
    tokens = [*"ab", "ab"]
    metadata = bpe_metadata(
        pre="glm4", tokens=tokens, token_type=[1, 1, 3], merges=[], bos_token_id=None, eos_token_id=None
    )

    assert Tokenizer.from_metadata(metadata).encode("ab") == [0, 1]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [4]),
        ({"add_bos_token": True}, [1, 4]),
        ({"add_eos_token": True}, [4, 2]),
        ({"pre": "llama-bpe"}, [1, 4]),
        ({"pre": "llama-bpe", "add_bos_token": False}, [4]),
    ],
)
def test_bos_and_eos_come_as_the_header_says(changes: dict[str, Any], expected: list[int]) -> None:
    tokenizer = Tokenizer.from_metadata(bpe_metadata(**changes))

    assert tokenizer.encode("a") == expected
    assert tokenizer.encode("a", add_special=False) == [4]


def test_bos_is_never_doubled() -> None:
    tokenizer = Tokenizer.from_metadata(bpe_metadata(add_bos_token=True))

    assert tokenizer.encode_rendered("<|im_start|>a") == [1, 4]
    assert tokenizer.encode_rendered("a") == [1, 4]
    assert tokenizer.encode("<|im_start|>a", parse_special=True) == [1, 4]


def test_the_space_prefix_comes_at_the_start_and_after_control_tokens_only(tiny_sp: Tokenizer) -> None:
    tokens = SP["vocabulary"]["tokens"]
    turn, tool = tokens.index("<turn>"), tokens.index("<tool>")
    with_prefix = tiny_sp.encode("the", add_special=False)
    bare = Tokenizer.from_metadata(sp_metadata(add_space_prefix=False)).encode("the", add_special=False)

    assert with_prefix != bare
    assert tiny_sp.encode("<turn>the", add_special=False, parse_special=True) == [turn, *with_prefix]
    assert tiny_sp.encode("the<tool>the", add_special=False) == [*with_prefix, tool, *bare]


def test_token_bytes_undo_both_alphabets(tiny_bpe: Tokenizer, tiny_sp: Tokenizer) -> None:
    for tokenizer in (tiny_bpe, tiny_sp):
        ids = tokenizer.encode("é 日", add_special=False)
        joined = b"".join(map(tokenizer.token_bytes, ids))
        assert joined.removeprefix(b" ") == "é 日".encode()
    assert Tokenizer.from_metadata(bpe_metadata()).token_bytes(2) == b"<|im_end|>"


def test_a_missing_pre_type_warns_and_uses_the_default() -> None:
    with pytest.warns(UserWarning, match=r"tokenizer\.ggml\.pre is absent"):
        tokenizer = Tokenizer.from_metadata(bpe_metadata(pre=None))

    assert tokenizer.encode("abc") == Tokenizer.from_metadata(bpe_metadata(pre="default")).encode("abc")


def test_an_unknown_pre_type_lists_the_known_ones() -> None:
    with pytest.raises(UnsupportedFeatureError, match=r"'zzz' is not known; known: .*qwen2.*smollm"):
        Tokenizer.from_metadata(bpe_metadata(pre="zzz"))


@pytest.mark.parametrize("model", [None, "no_vocab", "none"])
def test_a_checkpoint_without_a_tokenizer_says_so(model: str | None) -> None:
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        Tokenizer.from_metadata(bpe_metadata(model=model))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tokens": None}, "tokens is missing"),
    ({"tokens": []}, "tokens is missing or empty"),
    ({"tokens": ["a", 3]}, r"tokens\[1\] is int"),
    ({"tokens": "abc"}, "tokens is str, expected an array"),
    ({"tokens": ["a", "b", "a"], "token_type": None}, "tokens holds 'a' more than once"),
    ({"token_type": [1, 1]}, "token_type has 2 entries, tokenizer.ggml.tokens has 37"),
    ({"token_type": [1.5] * 37}, r"token_type\[0\] is 1.5, expected an integer"),
    ({"token_type": ["x"] * 37}, r"token_type\[0\] is 'x', expected an integer"),
    ({"token_type": [float("inf")] * 37}, r"token_type\[0\] is inf, expected an integer"),
    ({"token_type": [9] * 37}, r"token_type\[0\] is 9, expected 0 to 6"),
    ({"merges": None}, "merges is missing"),
    ({"merges": ["ab"]}, r"merges\[0\] is 'ab', expected two tokens"),
    ({"merges": ["a b", "a  b"]}, r"merges\[1\]"),
    ({"merges": ["a zz"]}, "merges does not fit tokenizer.ggml.tokens"),
    ({"merges": ["c d"]}, "merges does not fit tokenizer.ggml.tokens"),
    ({"bos_token_id": 37}, "bos_token_id is 37, but the vocabulary has ids 0 to 36"),
    ({"eos_token_id": -1}, "eos_token_id is -1"),
    ({"eot_token_id": "2"}, "eot_token_id is '2'"),
    ({"add_bos_token": "yes"}, "add_bos_token is 'yes'"),
]


@pytest.mark.parametrize(("changes", "sentence"), WRONG, ids=[sentence for _, sentence in WRONG])
def test_a_header_that_contradicts_itself_is_refused_by_the_name_of_the_key(
    changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"tokenizer\.ggml\.{sentence}"):
        Tokenizer.from_metadata(bpe_metadata(**changes))


def test_a_merge_longer_than_every_token_is_refused() -> None:
    # tokenizers panics on it, and a panic is no Exception
    tokens, types = [*map(chr, range(97, 123))], [1] * 26
    with pytest.raises(CheckpointError, match=r"merges does not fit .*: 'a' 'b' needs 'ab', which is no token"):
        Tokenizer.from_metadata(bpe_metadata(tokens=tokens, token_type=types, merges=["a b"]))


@pytest.mark.parametrize("token", ["<0x4", "<0xZZ>", "", "byte"])
def test_a_byte_token_must_spell_its_byte(token: str) -> None:
    tokens = list(SP["vocabulary"]["tokens"])
    index = SP["vocabulary"]["token_type"].index(6)
    tokens[index] = token
    with pytest.raises(CheckpointError, match=rf"tokens\[{index}\] is '{token}', but its type says byte"):
        Tokenizer.from_metadata(sp_metadata(tokens=tokens))


def test_a_piece_as_long_as_the_file_is_no_work() -> None:
    tokens = list(SP["vocabulary"]["tokens"])
    tokens[SP["vocabulary"]["token_type"].index(1)] = "q" * 300_000
    start_s = time.process_time()
    Tokenizer.from_metadata(sp_metadata(tokens=tokens))

    assert time.process_time() - start_s < 2.0  # 10 s where every cut is tried


def test_scores_are_needed_where_they_decide() -> None:
    for scores in (None, [], [1.0]):
        with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.scores"):
            Tokenizer.from_metadata(sp_metadata(scores=scores))
    with pytest.raises(CheckpointError, match=r"scores\[0\] is nan"):
        Tokenizer.from_metadata(sp_metadata(scores=[float("nan")] * len(SP["vocabulary"]["tokens"])))


def test_arrays_of_other_element_types_are_taken_when_no_value_changes(tiny_sp: Tokenizer) -> None:
    import numpy as np

    types = np.array(SP["vocabulary"]["token_type"], dtype=np.float64)
    scores = np.array(SP["vocabulary"]["scores"], dtype=np.float64).astype(int)
    other = Tokenizer.from_metadata(sp_metadata(token_type=types, scores=scores))

    assert other.encode("the quick brown") == tiny_sp.encode("the quick brown")


def test_a_vocabulary_that_cannot_encode_every_text_is_refused() -> None:
    tokens, types = ["a", "b"], [1, 1]
    with pytest.raises(CheckpointError, match="lacks the byte token <0x00>"):
        Tokenizer.from_metadata(sp_metadata(tokens=tokens, token_type=types, scores=[0.0, 0.0]))


def test_a_byte_that_has_no_token_is_left_out_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="no token for byte 0x5A"):
        ids = Tokenizer.from_metadata(bpe_metadata()).encode("a<|Z>")

    assert ids == [4, 30, 31, 32]


def test_a_lone_surrogate_is_refused(tiny_bpe: Tokenizer, tiny_sp: Tokenizer) -> None:
    for tokenizer in (tiny_bpe, tiny_sp):
        with pytest.raises(RequestError, match=r"lone surrogate U\+D800 at character 1"):
            tokenizer.encode("a\ud800")


def test_a_token_id_outside_the_vocabulary_is_refused(tiny_bpe: Tokenizer) -> None:
    for call in (tiny_bpe.token_bytes, tiny_bpe.is_special, lambda token_id: tiny_bpe.decode([token_id])):
        with pytest.raises(RequestError, match="token id -1 is not in the vocabulary"):
            call(-1)
        with pytest.raises(RequestError, match="token id 512 is not in the vocabulary"):
            call(512)


def test_a_long_text_is_encoded_in_milliseconds(tiny_bpe: Tokenizer, tiny_sp: Tokenizer) -> None:
    text = "The quick brown fox jumps over 13 lazy dogs. " * 1000
    for tokenizer in (tiny_bpe, tiny_sp):
        begin = time.process_time()
        tokenizer.encode_rendered(text)
        assert time.process_time() - begin < 1.0  # 0.04 s on an idle machine; a quadratic one takes minutes


@given(
    junk=st.dictionaries(
        st.sampled_from([k.split(".")[-1] for k in bpe_metadata()]),
        st.integers() | st.text() | st.lists(st.integers() | st.text()) | st.none(),
    )
)
@settings(max_examples=100, deadline=None)
def test_no_junk_in_a_header_escapes_as_anything_but_our_own_error(junk: dict[str, Any]) -> None:
    with contextlib.suppress(PocketLLMError):
        Tokenizer.from_metadata(bpe_metadata(**junk))


def test_token_types_are_the_format_s() -> None:
    assert [kind.value for kind in TokenType] == list(range(7))


def test_importing_the_text_parts_that_need_no_library_is_cheap() -> None:
    code = (
        "import sys, pocketllm.engine.text.stop_strings, pocketllm.engine.text.tokenizer, "
        "pocketllm.engine.text.chat_template, pocketllm.engine.text.detokenizer;"
        "print([m for m in ('tokenizers', 'jinja2', 'torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"
