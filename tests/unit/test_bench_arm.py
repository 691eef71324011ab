import doctest

import pytest

from pocketllm.bench import arm
from pocketllm.bench.arm import Isolation, Role, make_arms, parse_arm
from pocketllm.engine.options import SWITCHABLE, EngineOptions
from pocketllm.errors import OptionError


def test_an_arm_has_a_name_and_typed_options() -> None:
    parsed = parse_arm("wide:max_num_seqs=4,watermark=0.5,prefill_chunk=64")

    assert parsed.name == "wide"
    assert parsed.options == {"max_num_seqs": 4, "watermark": 0.5, "prefill_chunk": 64}
    assert parse_arm("base").options == {}


def test_a_url_takes_the_rest_of_the_string_colons_and_commas_included() -> None:
    assert parse_arm("peer:url=http://127.0.0.1:8080/a,b/v1/").url == "http://127.0.0.1:8080/a,b"


@pytest.mark.parametrize("key", sorted(SWITCHABLE))
def test_every_switchable_option_is_accepted(key: str) -> None:
    assert list(parse_arm(f"x:{key}=1").options) == [key]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is not a name"),
        (":prefill_chunk=64", "is not a name"),
        ("a b", "is not a name"),
        ("x" * 33, "is not a name"),
        ("null", "joins by itself"),
        ("x:", "nothing follows the colon"),
        ("x:prefill_chunk", "is not key=value"),
        ("x:prefill_chunk=64,", "nothing follows the last comma"),
        ("x:prefill_chunk=many", "is not a whole number"),
        ("x:prefill_chunk=64,prefill_chunk=32", "given twice"),
        ("x:nonsense=1", "known: max_num_batched_tokens, max_num_seqs, prefill_chunk, reserve, watermark, url"),
        ("x:threads=2", "cannot be switched over loaded weights"),
        ("x:cmd=llama-server -m x,y", "does not have"),
        ("x:path=../other", "does not have"),
        ("x:url=127.0.0.1:8080", "not an http"),
        ("x:url=http://", "not an http"),
        ("x:url=http://h:99999/", "not an http"),
        ("x:url=http://user:secret@h/", "without user"),
        ("x:prefill_chunk=64,url=http://h", "cannot be combined"),
    ],
)
def test_a_bad_arm_is_refused_in_one_sentence(text: str, reason: str) -> None:
    with pytest.raises(OptionError, match="--arms") as caught:
        parse_arm(text)

    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_null_arm_joins_by_itself_as_a_copy_of_the_baseline() -> None:
    arms = make_arms(["base:prefill_chunk=32", "b"], EngineOptions())

    assert arms.names == ("base", "b", "null")
    assert [item.role for item in arms.arms] == [Role.BASELINE, Role.CANDIDATE, Role.NULL]
    assert arms.null is not None
    assert arms.null.options == arms.baseline.options
    assert arms.isolation is Isolation.TOGGLE


def test_a_single_arm_is_compared_with_its_null() -> None:
    assert make_arms(["base"], EngineOptions()).names == ("base", "null")


def test_baseline_names_another_arm_than_the_first() -> None:
    arms = make_arms(["a", "b:prefill_chunk=64"], EngineOptions(), baseline="b")

    assert arms.names == ("b", "a", "null")
    assert arms.null is not None
    assert arms.null.options == {"prefill_chunk": 64}


def test_servers_are_attached_and_the_null_is_the_same_address() -> None:
    arms = make_arms(["a:url=http://h:1", "b:url=http://h:2"], EngineOptions())

    assert arms.isolation is Isolation.ATTACH
    assert arms.null is not None
    assert arms.null.url == "http://h:1"


@pytest.mark.parametrize(
    ("texts", "kwargs", "reason"),
    [
        ([], {}, "no arms"),
        (["a", "a:prefill_chunk=2"], {}, "two arms are called"),
        (["a", "b"], {}, "equal in plan and target"),
        (["a", "b:prefill_chunk=256"], {}, "equal in plan and target"),
        (["a:url=http://h:1", "b:url=http://h:1/v1"], {}, "equal in plan and target"),
        (["a", "b:url=http://h:1"], {}, "serve both"),
        (["a"], {"with_null": False}, "nothing to compare"),
        (["a", "b:prefill_chunk=2"], {"baseline": "c"}, "is not an arm; arms: a, b"),
        (["a", "b:prefill_chunk=0"], {}, r"prefill_chunk=0 \(--arms b\) must be at least 1"),
        (["a", "b:watermark=2"], {}, "between 0 and 1"),
        (["a", "b:max_num_batched_tokens=4"], {}, "below max_num_seqs"),
    ],
)
def test_a_set_of_arms_that_means_nothing_is_refused(texts: list[str], kwargs: dict[str, object], reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        make_arms(texts, EngineOptions(), **kwargs)  # type: ignore[arg-type]  # a table of keyword arguments


def test_no_null_leaves_two_arms() -> None:
    assert make_arms(["a", "b:prefill_chunk=2"], EngineOptions(), with_null=False).names == ("a", "b")


def test_the_examples_of_arms_are_true() -> None:
    assert doctest.testmod(arm).failed == 0
