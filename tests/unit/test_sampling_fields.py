"""Bans, DRY, XTC, mirostat, min_tokens and included stops: each against a plain statement of what it promises."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pocketllm.engine.lifecycle.output_text import OutputText
from pocketllm.engine.lifecycle.request import FinishReason, Request
from pocketllm.engine.lifecycle.sampling.bans import Bans, bad_word_ids
from pocketllm.engine.lifecycle.sampling.dry import Dry
from pocketllm.engine.lifecycle.sampling.logits_processors import without_top_choices
from pocketllm.engine.lifecycle.sampling.mirostat import Mirostat
from pocketllm.engine.lifecycle.sampling.params import SamplingParams
from pocketllm.engine.lifecycle.sampling.sampler import Sampler
from pocketllm.errors import RequestError
from tests.fake_model import EOS, FakeTokenizer, logits_after
from tests.unit.test_loop import Inbox, fake_loop, greedy_reference, run, submit
from tests.unit.test_sampler import sample

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Letters(FakeTokenizer):
    """Token i is one character from `a` on; 30 is a line end, 31 a space; pairs of characters are no tokens."""

    vocab_size: int = 32

    def token_bytes(self, token_id: int) -> bytes:
        return {30: b"\n", 31: b" "}.get(token_id, bytes([97 + token_id]))

    def is_special(self, token_id: int) -> bool:
        return False

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        return [{"\n": 30, " ": 31}.get(character, ord(character) - 97) for character in text]


def adjusted(adjustment: Any, size: int = 32) -> Logits:
    row = np.zeros(size, np.float32)
    for edit in adjustment.edits():
        edit.apply(row)
    return row


# -- bans
def test_before_min_tokens_no_end_token_can_be_drawn_and_then_it_can() -> None:
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[3])
    sampler = Sampler(params, 0, [], FakeTokenizer())
    row = np.zeros(97, np.float32)
    row[[EOS, 3, 7]] = 9, 8, 1

    assert [sample(sampler, row)[0] for _ in range(3)] == [7, 7, EOS]


def test_ignored_end_tokens_are_no_ends_for_min_tokens_either() -> None:
    sampler = Sampler(SamplingParams(temperature=0, min_tokens=2, ignore_eos=True), 0, [], FakeTokenizer())
    row = np.zeros(97, np.float32)
    row[EOS] = 9

    assert sample(sampler, row)[0] == EOS


def test_only_allowed_tokens_are_drawn_whatever_their_bias() -> None:
    params = SamplingParams(temperature=5, allowed_token_ids=[4, 9], logit_bias={2: 100})
    sampler = Sampler(params, 1, [], Letters())
    row = np.random.default_rng(1).normal(size=32).astype(np.float32)

    assert {sample(sampler, row)[0] for _ in range(50)} == {4, 9}


def test_a_bad_word_is_banned_where_it_would_be_completed() -> None:
    bans = Bans(SamplingParams(bad_words=["abc", "d"]), Letters())
    assert np.isneginf(adjusted(bans)).nonzero()[0].tolist() == [3]
    for token_id in (0, 1):
        bans.append(token_id)

    assert np.isneginf(adjusted(bans)).nonzero()[0].tolist() == [2, 3]
    bans.append(5)
    assert np.isneginf(adjusted(bans)).nonzero()[0].tolist() == [3]


def test_a_bad_word_is_banned_with_a_space_before_it_where_that_is_another_token() -> None:
    class Spaced(Letters):
        def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
            return {"cat": [5], " cat": [6], "dogs": [7, 8], " dogs": [9, 1, 8]}[text]

    assert bad_word_ids(["cat", "dogs"], Spaced()) == [[5], [6], [7, 8]]


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"allowed_token_ids": [32]}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1, 5]}, "allowed_token_ids"),
        ({"allowed_token_ids": [5], "bad_words": ["a"]}, "bad_words"),
        ({"allowed_token_ids": [5], "min_tokens": 1, "stop_token_ids": [5]}, "allowed_token_ids"),
    ],
)
def test_bans_that_leave_nothing_are_refused_before_a_step(params: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as refused:
        Sampler(SamplingParams(**params), 0, [], Letters())
    assert refused.value.param == field


# -- DRY
def dry_plainly(tokens: Sequence[int], breakers: set[int], params: SamplingParams, vocab: int) -> Logits:
    """The penalty of every token by its words: for each length, where the last tokens stood before."""
    last_n = params.dry_penalty_last_n
    text = list(tokens) if last_n < 0 else list(tokens)[max(0, len(tokens) - last_n) :]
    row = np.zeros(vocab, np.float32)
    for token_id in range(vocab):
        if token_id in breakers:
            continue
        best = 0
        for length in range(1, len(text)):
            end = text[len(text) - length :]
            if breakers & set(end):
                break
            if any(text[i : i + length] == end and text[i + length] == token_id for i in range(len(text) - length)):
                best = length
        if best >= params.dry_allowed_length:
            row[token_id] -= params.dry_multiplier * params.dry_base ** (best - params.dry_allowed_length)
    return row


@given(
    prompt=st.lists(st.sampled_from([0, 1, 2, 30]), max_size=14),
    answer=st.lists(st.sampled_from([0, 1, 2, 30]), max_size=14),
    allowed=st.integers(1, 4),
    last_n=st.sampled_from([-1, 1, 3, 8, 100]),
)
def test_dry_is_its_plain_statement(prompt: list[int], answer: list[int], allowed: int, last_n: int) -> None:
    params = SamplingParams(
        dry_multiplier=0.8,
        dry_base=2.0,
        dry_allowed_length=allowed,
        dry_penalty_last_n=last_n,
        dry_sequence_breakers=["\n"],
    )
    dry = Dry(params, prompt, Letters())
    for token_id in answer:
        dry.append(token_id)

    np.testing.assert_allclose(adjusted(dry), dry_plainly(prompt + answer, {30}, params, 32), rtol=1e-6)


def test_dry_looks_at_the_last_tokens_not_at_the_first() -> None:
    def penalties(last_n: int, prompt: list[int]) -> dict[int, float]:
        params = SamplingParams(dry_multiplier=1.0, dry_penalty_last_n=last_n, dry_sequence_breakers=[])
        row = adjusted(Dry(params, prompt, Letters()))
        return {int(token_id): float(row[token_id]) for token_id in np.flatnonzero(row)}

    assert penalties(4, [0, 1, 2, 9, 9, 8, 0, 1]) == {}
    assert penalties(-1, [0, 1, 2, 9, 9, 8, 0, 1]) == {2: -1}
    assert penalties(4, [9, 9, 5, 5, 0, 1, 0, 1]) == {0: -1}
    assert penalties(4, [9, 0, 0, 0, 0]) == {0: -1.75}


def test_a_breaker_of_two_tokens_ends_a_repetition_too() -> None:
    params = SamplingParams(dry_multiplier=1.0, dry_allowed_length=1, dry_sequence_breakers=["ab"])
    dry = Dry(params, [5, 0, 1, 7, 5, 0, 1], Letters())

    assert not adjusted(dry).any()
    dry.append(9)
    dry.append(7)
    assert adjusted(dry)[5] == -1
    assert np.count_nonzero(adjusted(dry)) == 1


def test_a_penalty_past_what_float32_holds_is_still_a_number() -> None:
    params = SamplingParams(dry_multiplier=100.0, dry_base=100, dry_sequence_breakers=[])

    assert np.isfinite(adjusted(Dry(params, [1] * 200, Letters()))).all()


# -- XTC
@given(st.lists(st.integers(0, 20), min_size=1, max_size=12).filter(any), st.floats(0, 1))
def test_xtc_is_its_plain_statement(weights: list[int], threshold: float) -> None:
    values = np.array(weights, np.float32)
    probabilities = values.astype(np.float64) / values.sum(dtype=np.float64)
    order = sorted(range(len(weights)), key=lambda place: (-weights[place], place))
    above = [place for place in order if values[place] >= threshold * values.sum(dtype=np.float64)]
    gone = above[:-1] if threshold <= 0.5 else []

    kept = without_top_choices(values, threshold)

    assert sorted(set(range(len(weights))) - set(gone)) == kept.tolist()
    assert probabilities[kept].sum() > 0 or threshold == 0


def test_xtc_acts_as_often_as_it_was_asked_to() -> None:
    row = np.log(np.array([0.6, 0.3, 0.1], np.float32))

    def firsts(probability: float) -> int:
        params = SamplingParams(xtc_probability=probability, xtc_threshold=0.2)
        sampler = Sampler(params, 3)
        return sum(sample(sampler, row)[0] == 0 for _ in range(400))

    assert firsts(1.0) == 0
    assert 80 < firsts(0.5) < 160
    assert 210 < firsts(1e-9) < 270


# -- mirostat
@given(st.integers(0, 2**32), st.floats(0.5, 8), st.floats(0.01, 1))
def test_mirostat_is_its_plain_statement(seed: int, tau: float, eta: float) -> None:
    random = np.random.default_rng(seed)
    params = SamplingParams(mirostat=2, mirostat_tau=tau, mirostat_eta=eta)
    sampler, mu = Sampler(params, seed), 2 * tau
    for _ in range(5):
        row = random.normal(0, 3, 40).astype(np.float32)
        probabilities = np.exp(row.astype(np.float64) - row.max())
        probabilities /= probabilities.sum()
        kept = np.flatnonzero(-np.log2(probabilities) <= mu + 1e-5)
        kept = kept if len(kept) else np.array([int(np.argmax(row))])
        token_id, _ = sample(sampler, row)

        assert token_id in kept
        surprise = -np.log2(probabilities[token_id] / probabilities[kept].sum())
        mu -= eta * (surprise - tau)
        assert sampler._mirostat is not None
        assert sampler._mirostat.mu == pytest.approx(mu, abs=1e-3)


def test_mirostat_keeps_the_likeliest_when_all_surprise_too_much() -> None:
    mirostat = Mirostat(SamplingParams(mirostat=2, mirostat_tau=0.1))

    assert mirostat.keep(np.array([0.5, 1.0, 0.5], np.float32)).tolist() == [1]


@pytest.mark.parametrize("other", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"xtc_probability": 0.5}])
def test_a_filter_beside_mirostat_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="mirostat takes the place"):
        SamplingParams(mirostat=2, **other)


# -- stops
def test_a_stop_string_counts_only_after_min_tokens() -> None:
    expected = greedy_reference([1, 2, 3], 10)
    letters = "".join(chr(65 + token_id) for token_id in expected)
    loop, _, _ = fake_loop()
    inbox = submit(loop, [1, 2, 3], stop=(letters[2], letters[6]), min_tokens=4, ignore_eos=True)
    run(loop)

    assert letters.index(letters[6]) == 6
    assert inbox.text == letters[:6]
    assert inbox.finish.reason is FinishReason.STOP


@pytest.mark.parametrize("with_stop", [False, True])
def test_the_text_ends_with_its_stop_when_that_was_asked_for(with_stop: bool) -> None:
    expected = greedy_reference([1, 2, 3], 10)
    letters = "".join(chr(65 + token_id) for token_id in expected)
    for stop in ({"stop": (letters[3:5],)}, {"stop_token_ids": (expected[4],)}):
        loop, _, _ = fake_loop()
        inbox = submit(loop, [1, 2, 3], include_stop_str_in_output=with_stop, ignore_eos=True, **stop)
        run(loop)

        without = letters[:3] if "stop" in stop else letters[:4]
        assert inbox.text == (letters[:5] if with_stop else without)
        assert inbox.finish.reason is FinishReason.STOP


def test_a_stop_string_completed_by_the_last_character_is_included_too() -> None:
    class Halves(FakeTokenizer):
        def token_bytes(self, token_id: int) -> bytes:
            return b"\xe2"

    text = OutputText(Halves(), ["\ufffd"], with_stop=True)
    text.push(5)

    assert text.finish() == ("\ufffd", "\ufffd")


# -- batches
FIELDS: list[dict[str, Any]] = [
    {"top_k": 5, "typical_p": 0.9},
    {"min_tokens": 8, "bad_words": ["BC", "Q"]},
    {"allowed_token_ids": [*range(3, 40)], "repetition_penalty": 1.2},
    {"dry_multiplier": 0.8, "frequency_penalty": 0.4},
    {"xtc_probability": 0.5},
    {"mirostat": 2},
]


@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: "-".join(fields))
def test_a_seeded_request_draws_the_same_beside_requests_with_every_other_field(fields: dict[str, Any]) -> None:
    def draws(others: list[dict[str, Any]], **limits: Any) -> list[int]:
        loop, _, _ = fake_loop(**limits)
        params = SamplingParams(**{"seed": 11, "ignore_eos": True, "max_tokens": 10} | fields)
        inbox = Inbox()
        loop.submit(Request("seeded", [1, 2, 3, 2, 3], params), inbox)
        for number, other in enumerate(others):
            submit(loop, [number + 1] * 5, str(number), **{"temperature": 1.3, "ignore_eos": True} | other)
        run(loop)
        return inbox.token_ids

    alone = draws([])

    assert len(alone) == 10
    assert draws(FIELDS, max_num_seqs=4) == alone
    assert draws(FIELDS, max_num_seqs=8, prefill_chunk=2) == alone


def test_fields_that_ask_for_nothing_copy_no_row() -> None:
    sampler = Sampler(SamplingParams(top_p=0.9, mirostat=0, dry_multiplier=0, min_tokens=0), 0)

    assert sampler._adjustments == []
    assert logits_after([1]).dtype == np.float32
