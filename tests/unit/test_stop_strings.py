"""The outcome of stop strings does not depend on how the text is cut."""

import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pocketllm.engine.text.stop_strings import StopChecker
from pocketllm.errors import RequestError

TEXTS = st.text(alphabet="abc\u00e9", max_size=30)
STOPS = st.lists(st.text(alphabet="abc\u00e9", min_size=1, max_size=4), max_size=4)


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Read character by character, as slowly and plainly as can be."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            stop = max(done, key=len)
            return text[: end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    checker = StopChecker(stops)
    emitted, hits = "", []
    for piece in pieces:
        emit, hit = checker.push(piece)
        emitted += emit
        hits += [hit] if hit is not None else []
    assert len(hits) <= 1
    return emitted + checker.flush(), hits[0] if hits else None


@given(text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=8))
@settings(max_examples=500)
def test_what_is_passed_on_is_the_text_up_to_the_first_stop_for_every_way_to_cut_it(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[begin:end] for begin, end in pairwise(edges)]

    assert run(pieces, stops) == expected(text, stops)
    assert run(list(text), stops) == expected(text, stops)


def test_only_what_may_become_a_stop_is_held_back() -> None:
    checker = StopChecker(["<end>", "\n\n"])

    assert checker.push("hello <e") == ("hello ", None)
    assert checker.push("!\n") == ("<e!", None)
    assert checker.push("\n") == ("", "\n\n")
    assert checker.push("more") == ("", None)
    assert checker.flush() == ""


def test_without_stops_everything_passes_at_once() -> None:
    assert StopChecker([]).push("text") == ("text", None)


def test_the_stop_that_is_complete_first_wins_and_then_the_longest() -> None:
    assert StopChecker(["abcd", "bc"]).push("xabcd") == ("xa", "bc")
    assert StopChecker(["c", "abc"]).push("xabcd") == ("x", "abc")


def test_a_stop_that_contains_commas_is_one_stop() -> None:
    assert run(["a", ",b", ",c"], ["b,c"]) == ("a,", "b,c")


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(RequestError, match="stop string 1 is empty"):
        StopChecker(["a", ""])


def test_a_token_costs_the_same_however_long_the_text_is() -> None:
    checker = StopChecker(["never seen", "aaaaab"])
    begin = time.process_time()
    for _ in range(50_000):
        checker.push("a")

    assert time.process_time() - begin < 3.0  # 0.1 s on an idle machine
