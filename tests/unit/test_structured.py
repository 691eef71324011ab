"""Grammars without a server: what compiles, which tokens a mask allows, and how a held request moves in the loop."""

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pocketllm.engine.chat_formats.markup import Markup, Thought
from pocketllm.engine.lifecycle.request import Event, FinishEvent, FinishReason, Request
from pocketllm.engine.lifecycle.sampling.params import SamplingParams
from pocketllm.engine.structured import compiler as compiler_module
from pocketllm.engine.structured import constraint
from pocketllm.engine.structured.compiler import GrammarCompiler
from pocketllm.engine.structured.constraint import Constraint
from pocketllm.engine.structured.matcher import Matcher
from pocketllm.engine.structured.worker import MaskWorker
from pocketllm.errors import ConstraintError, RequestError
from tests.byte_vocabulary import WORDS, ByteTokenizer
from tests.fake_model import fake_loop

TREE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "kids": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
    },
    "required": ["name"],
    "additionalProperties": False,
}
TOKENIZER = ByteTokenizer()
COMPILER = GrammarCompiler(TOKENIZER)  # type: ignore[arg-type]  # a fake


def takes(held: Constraint, text: str) -> bool:
    """Whether a whole text obeys, byte by byte."""
    matcher = COMPILER.matcher(held)
    try:
        for byte in text.encode():
            matcher.accept(byte)
        return matcher.is_complete or bool(matcher.allowed()[TOKENIZER.end])
    except ConstraintError:
        return False


@given(seed=st.integers(0, 10**6), steps=st.integers(0, 12))
@settings(max_examples=6, deadline=None)
def test_a_mask_allows_exactly_the_tokens_that_can_be_accepted(seed: int, steps: int) -> None:
    held = constraint.json_schema(TREE)
    ids = TOKENIZER.walk(COMPILER.matcher(held), seed, steps)

    def at_place() -> Matcher:
        matcher = COMPILER.matcher(held)
        for token_id in ids:
            matcher.accept(token_id)
        return matcher

    place = at_place()
    if place.is_complete:
        return
    # a token that is not taken costs milliseconds: a part of the bytes, and every longer token
    possible, tried = [], [*b' \n"a0,:[]{}\\nt', *range(256, TOKENIZER.vocab_size)]
    for token_id in tried:
        matcher = at_place()
        try:
            matcher.accept(token_id)
        except ConstraintError:
            continue
        possible.append(token_id)

    # an end token is always taken by `accept`; only where the text obeys may it come
    allowed = [token_id for token_id in tried if place.allowed()[token_id]]
    texts = [one for one in allowed if one != TOKENIZER.end]
    if len(texts) == 1 and texts != possible:
        # bytes that are forced are spelled as the tokenizer would spell them, in the longest tokens
        assert texts == [max((one for one in possible if one != TOKENIZER.end), key=TOKENIZER.length)]
    else:
        assert texts == [one for one in possible if one != TOKENIZER.end]
    assert (TOKENIZER.end in allowed) == takes(held, TOKENIZER.decode(ids))


@given(seed=st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_whatever_is_drawn_from_the_masks_of_a_schema_obeys_it(seed: int) -> None:
    matcher = COMPILER.matcher(constraint.json_schema(TREE))
    ids = TOKENIZER.walk(matcher, seed, 300)

    if matcher.is_complete:
        check_tree(json.loads(TOKENIZER.decode(ids)))


def check_tree(value: dict[str, object]) -> None:
    assert set(value) <= {"name", "kids"}
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 5
    kids = value.get("kids", [])
    assert isinstance(kids, list)
    assert len(kids) <= 2
    for kid in kids:
        check_tree(kid)


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"$ref": "#/$defs/C", "$defs": {"C": {"enum": ["r", "g"]}}}, ['"r"'], ['"b"', "{}"]),
        (
            {"type": "array", "items": {"oneOf": [{"type": "string"}, {"type": "integer"}]}},
            ['["a", 1]', "[]"],
            ["[1.5]", "[null]"],
        ),
        ({"type": "string", "pattern": "^hello there indeed\\\\!$"}, ['"hello there indeed\\\\!"'], ['"hello"']),
        ({"type": "string", "pattern": "b"}, ['"abc"'], ['"ac"']),
        ({"type": "object", "properties": {"a": {"type": "string", "maxLength": 4000}}}, ['{"a": "x"}'], ['{"a": 1}']),
        ({"type": "object"}, ['{\n  "a": 1\n}', "{ }"], ['{"a":   1}', "{\n\n}", "[]"]),
        (True, ["1", "null"], ["x"]),
        ({"type": "string", "format": "date"}, ['"2024-02-29"', '"2000-02-29"'], ['"2023-02-29"', '"2100-02-29"']),
        (
            {"format": "time"},
            ['"23:59:60Z"', '"15:59:60-08:00"', '"08:30:06.5+01:00"', "3"],
            ['"22:59:60Z"', '"15:59:60+08:00"', '"24:00:00Z"'],
        ),
        ({"format": "date-time", "pattern": "^2"}, ['"2020-12-31T23:59:59Z"'], ['"1999-12-31T23:59:59Z"']),
        ({"enum": [{"format": "date"}]}, ['{"format": "date"}'], ['"2020-01-01"']),
    ],
)
def test_schemas_that_trip_others_take_what_is_valid_and_nothing_else(
    schema: object, valid: list[str], invalid: list[str]
) -> None:
    held = constraint.json_schema(schema)

    assert [text for text in valid if not takes(held, text)] == []
    assert [text for text in invalid if takes(held, text)] == []


WORDS_OF_SCHEMAS = ["type", "properties", "items", "enum", "anyOf", "allOf", "oneOf", "required", "$defs", "$ref"]
WORDS_OF_SCHEMAS += ["format", "pattern", "minimum"]
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["string", "object", "date", "#", "(", "a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS_OF_SCHEMAS), inner, max_size=4),
    max_leaves=10,
)


@given(schema=st.dictionaries(st.sampled_from(WORDS_OF_SCHEMAS), ANY_JSON, max_size=5))
@settings(max_examples=150, deadline=None)
def test_whatever_comes_as_a_schema_is_held_to_or_refused(schema: dict[str, object]) -> None:
    with suppress(RequestError):
        COMPILER.matcher(constraint.json_schema(schema)).allowed()


@given(text=st.text(alphabet='start:rooST=|()[]{}"/\\*+?#%<>~@_ \nab0-', max_size=60))
@settings(max_examples=150, deadline=None)
def test_whatever_comes_as_a_grammar_or_an_expression_is_held_to_or_refused(text: str) -> None:
    for make in (constraint.grammar, constraint.gbnf, constraint.regex):
        with suppress(RequestError):
            COMPILER.matcher(make(text)).allowed()


@pytest.mark.parametrize(
    "make",
    [
        lambda: constraint.regex("(a"),
        lambda: constraint.gbnf('root ::= "a" foo'),
        lambda: constraint.gbnf("root ::= ("),
        lambda: constraint.json_schema("{"),
    ],
)
def test_what_is_no_grammar_has_one_code_whoever_finds_it(make: Callable[[], Constraint]) -> None:
    with pytest.raises(RequestError) as caught:
        COMPILER.matcher(make())
    assert caught.value.code == "invalid_grammar"


def test_a_pydantic_model_with_two_nested_models_compiles() -> None:
    from pydantic import BaseModel

    class City(BaseModel):
        name: str

    class Person(BaseModel):
        name: str
        home: City

    class Trip(BaseModel):
        who: Person
        to: City | None

    text = Trip(who=Person(name="A", home=City(name="B")), to=None).model_dump_json()

    assert takes(constraint.json_schema(Trip.model_json_schema()), text)


@pytest.mark.parametrize(
    ("held", "valid", "invalid"),
    [
        (constraint.regex(r"^a\$$"), ["a$"], ["a"]),
        (constraint.regex(r"\d/[/\n]"), ["1//", "1/\n"], ["٣//", "1/"]),
        (constraint.choice(["a", "ab", "a.c", "\\"]), ["a", "ab", "a.c", "\\"], ["abc", "axc"]),
        (constraint.grammar('root ::= item ("," item)*\nitem ::= [a-z]+ | "\\u00e9"'), ["ab,é,c"], ["ab,", "A"]),
        (constraint.grammar('root ::= "(" root ")" | "x" # deep\n'), ["((x))"], ["((x)", ""]),
        (constraint.grammar('%llguidance {}\nstart: "x"{2,3}'), ["xx", "xxx"], ["x", "xxxx"]),
        (constraint.grammar("?start: WORD\nWORD: /[a-z]+/"), ["word"], ["Word"]),
    ],
    ids=lambda value: value.kind if isinstance(value, Constraint) else None,
)
def test_expressions_choices_and_grammars_take_what_they_say(
    held: Constraint, valid: list[str], invalid: list[str]
) -> None:
    assert [text for text in valid if not takes(held, text)] == []
    assert [text for text in invalid if takes(held, text)] == []


@pytest.mark.parametrize(
    ("make", "source", "told"),
    [
        (constraint.json_schema, {"not": {}}, "not"),
        (constraint.json_schema, {"oneOf": [{"type": "integer"}, {"type": "number"}]}, "use anyOf"),
        (
            constraint.json_schema,
            {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}},
            "uniqueItems",
        ),
        (constraint.json_schema, {"$ref": "https://example.com/schema"}, "example.com"),
        (constraint.json_schema, '{"type": ', "not JSON"),
        (constraint.json_schema, [], "list"),
        (constraint.regex, "a^b", "not supported"),
        (constraint.regex, "x" * 300_000, "the limit is"),
        (constraint.choice, ["a"] * 5000, "the limit is"),
        (constraint.choice, "abc", "list"),
        (constraint.grammar, "root ::= [", "GBNF"),
        (constraint.grammar, "root ::= " + "(" * 3000, "GBNF|too deep"),
        (constraint.grammar, "start: " + "(" * 5000, "nested"),
        (constraint.grammar, "start: start", "matches no"),
        (constraint.grammar, 'start: ""', "empty text"),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value)[:40],
)
def test_what_cannot_be_held_to_is_refused_with_its_reason(make: object, source: object, told: str) -> None:
    with pytest.raises(RequestError, match=told) as caught:
        COMPILER.matcher(make(source, "field"))  # type: ignore[operator]

    assert caught.value.param == "field"
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1200


def test_no_constraint_takes_long_to_refuse_or_to_compile() -> None:
    hard = [
        constraint.regex("(a{1000}){1000}"),
        constraint.regex("(.*a){20}b.{300}c"),
        constraint.json_schema({"enum": [f"v{number}" for number in range(5000)]}),
        constraint.json_schema({"type": "string", "maxLength": 200_000}),
    ]
    for held in hard:
        start_s = time.process_time()
        with suppress(RequestError):
            COMPILER.matcher(held).allowed()
        assert time.process_time() - start_s < 5, held.kind


def test_what_takes_longer_than_allowed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "MAX_COMPILE_S", 0.0)

    with pytest.raises(RequestError, match="the limit is 0 s"):
        GrammarCompiler(TOKENIZER).matcher(constraint.regex("a+"))  # type: ignore[arg-type]  # a stand-in, or wrong on purpose


def test_a_constraint_is_compiled_once_and_its_matchers_are_independent() -> None:
    compiler, told = GrammarCompiler(TOKENIZER), list[float]()  # type: ignore[arg-type]  # a fake
    compiler.listeners.append(told.append)
    first, second = (compiler.matcher(constraint.regex("ab|cd")) for _ in range(2))
    first.accept(ord("a"))

    assert len(told) == 1
    assert np.flatnonzero(first.allowed()).tolist() == [ord("b")]
    assert {ord("a"), ord("c")} <= set(np.flatnonzero(second.allowed()).tolist())


def test_many_copies_of_one_constraint_do_not_wear_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "MAX_COPIES", 10)
    compiler, told = GrammarCompiler(TOKENIZER), list[float]()  # type: ignore[arg-type]  # a fake
    compiler.listeners.append(told.append)
    for number in range(35):
        TOKENIZER.walk(compiler.matcher(constraint.json_schema(TREE)), number, 30)

    assert len(told) == 4


def test_a_stop_token_is_forbidden_until_the_grammar_may_end_and_allowed_then() -> None:
    stop = ord("b")
    matcher = COMPILER.matcher(constraint.regex("[ab]{2,3}|ac"), stop_token_ids=(stop,))

    assert not matcher.allowed()[stop]
    matcher.accept(ord("a"))
    assert not matcher.allowed()[stop]
    matcher.accept(ord("a"))
    assert matcher.allowed()[[stop, TOKENIZER.end]].all()
    matcher.accept(stop)
    assert matcher.is_complete


def test_a_mask_is_the_same_computed_beside_the_forward_pass() -> None:
    worker = MaskWorker()
    matchers = [COMPILER.matcher(constraint.json_schema(TREE)) for _ in range(8)]
    worker.prefetch(matchers)
    worker.prefetch(matchers)  # what is on its way is not asked for twice

    here = COMPILER.matcher(constraint.json_schema(TREE)).allowed()
    assert all(np.array_equal(matcher.allowed(), here) for matcher in matchers)
    assert any(thread.name.startswith("pocketllm-masks") for thread in threading.enumerate())
    worker.close()


def run(held: Constraint | None, **params: object) -> tuple[str, FinishEvent]:
    """One request through the real loop over the fake model."""
    loop, _, _ = fake_loop()
    events: list[Event] = []
    values = {"max_tokens": 20, "temperature": 0.0, **params}
    loop.submit(Request("r", [1, 2, 3], SamplingParams(constraint=held, **values)), events.append)  # type: ignore[arg-type]  # a stand-in, or wrong on purpose
    while loop.step():
        pass
    end = events[-1]
    assert isinstance(end, FinishEvent)
    assert sum(isinstance(event, FinishEvent) for event in events) == 1
    return "".join(event.text for event in events), end


def test_a_held_answer_ends_by_itself_and_counts_its_tokens() -> None:
    text, end = run(constraint.choice(["HELLO", "WORLD"]))

    assert text in ("HELLO", "WORLD")
    assert (end.reason, end.num_output_tokens) == (FinishReason.STOP, 5)


@pytest.mark.parametrize(
    ("params", "text", "reason"),
    [
        ({"max_tokens": 3}, "ABC", FinishReason.LENGTH),
        ({"stop": ("CD",)}, "AB", FinishReason.STOP),
        ({"stop": ("CD",), "include_stop_str_in_output": True}, "ABCD", FinishReason.STOP),
        ({"min_tokens": 8}, "ABCDEF", FinishReason.STOP),
        ({"ignore_eos": True}, "ABCDEF", FinishReason.STOP),
        ({"temperature": 2.0, "seed": 3, "top_p": 0.5, "min_p": 0.2, "top_k": 3}, "ABCDEF", FinishReason.STOP),
        ({"repetition_penalty": 5.0, "frequency_penalty": 2.0}, "ABCDEF", FinishReason.STOP),
    ],
    ids=str,
)
def test_a_grammar_goes_with_every_other_field(params: dict[str, object], text: str, reason: FinishReason) -> None:
    found, end = run(constraint.regex("ABCDEF"), **params)

    assert (found, end.reason) == (text, reason)


def test_a_request_that_cannot_go_on_ends_in_an_error_with_its_reason() -> None:
    text, end = run(constraint.grammar('start: "AB" /[^\\x00-\\x{10FFFF}]/'))
    _, banned = run(constraint.regex("ABC"), allowed_token_ids=(3, 4))

    assert (end.reason, end.is_unanswerable) == (FinishReason.ERROR, True)
    assert text in ("", "A", "AB")
    assert "no further token" in str(end.error)
    assert (banned.reason, banned.is_unanswerable) == (FinishReason.ERROR, True)
    assert "ban" in str(banned.error)


def test_a_dead_end_of_a_grammar_takes_nothing_that_was_cached_from_others() -> None:
    loop, _, _ = fake_loop(prefix_cache=True)
    for name, held in (("a", None), ("b", constraint.regex("ABC")), ("c", None)):
        banned = (3, 4) if held else ()
        params = SamplingParams(max_tokens=2, temperature=0.0, constraint=held, allowed_token_ids=banned)
        events: list[Event] = []
        loop.submit(Request(name, [1, 2, 3, 4, 5, 6], params), events.append)
        while loop.step():
            pass

    end = events[-1]
    assert isinstance(end, FinishEvent)
    assert end.num_cached_tokens == 4


def test_a_constraint_that_cannot_be_compiled_is_refused_at_submit_and_the_loop_goes_on() -> None:
    loop, _, _ = fake_loop()
    with pytest.raises(RequestError, match="cannot be compiled"):
        loop.submit(Request("r", [1], SamplingParams(constraint=constraint.regex("(a"))), lambda event: None)

    assert loop.stats().num_rejected == 1
    assert run(None)[1].reason is FinishReason.LENGTH


def test_a_tokenizer_that_fails_and_a_library_that_panics_end_one_request_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Failing(ByteTokenizer):
        def encode_inside(self, text: str) -> list[int]:
            raise RuntimeError("a bug")

    forced = GrammarCompiler(Failing()).matcher(constraint.regex("abc"))  # type: ignore[arg-type]  # a fake
    assert np.flatnonzero(forced.allowed()).tolist() == [256 + WORDS.index("ab")]

    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})
    matcher = COMPILER.matcher(constraint.regex("[ab]+"))
    monkeypatch.setattr(matcher, "_automaton", SimpleNamespace(unsafe_compute_mask_ptr=Mock(side_effect=panic())))
    MaskWorker().prefetch([matcher])
    with pytest.raises(ConstraintError, match="library failed"):
        matcher.allowed()


def test_a_bare_schema_is_not_taken_for_a_constraint() -> None:
    with pytest.raises(RequestError, match=r"engine\.structured\.constraint"):
        SamplingParams(constraint={"type": "object"})  # type: ignore[arg-type]  # a stand-in, or wrong on purpose


def test_a_preempted_answer_goes_on_in_its_grammar() -> None:
    loop, scheduler, _ = fake_loop(
        num_blocks=8, max_num_seqs=4, block_size=2, max_model_len=16, watermark=0.0, reserve=0.0
    )
    texts: dict[str, str] = {}

    def sink(event: Event) -> None:
        texts[event.request_id] = texts.get(event.request_id, "") + event.text

    held = SamplingParams(max_tokens=10, temperature=0.0, constraint=constraint.regex("(AB){4}C"))
    for name in "abc":
        loop.submit(Request(name, [1, 2, ord(name) - 90], held), sink)
    while loop.step():
        pass

    assert scheduler.num_preemptions > 0
    assert set(texts.values()) == {"ABABABABC"}


def test_stop_strings_do_not_count_inside_a_thought() -> None:
    thought = Thought("[", "]", is_open=True)
    text, end = run(constraint.regex(r"ASTOPB\]CSTOPD"), stop=("STOP",), markup=Markup(thought=thought))

    assert (text, end.reason) == ("ASTOPB]C", FinishReason.STOP)
    assert run(constraint.regex(r"ASTOPB\]CSTOPD"), stop=("STOP",))[0] == "A"


def test_a_preface_and_two_bodies_are_one_grammar() -> None:
    held = constraint.regex("X+").or_else(constraint.choice(["YES"])).after("preface: (/[a-z]{2}/)?")

    assert [text for text in ("XX", "abXX", "YES", "abYES") if not takes(held, text)] == []
    assert [text for text in ("aXX", "abc", "XXYES", "ab") if takes(held, text)] == []


def test_a_file_of_the_command_line_is_read_or_refused(tmp_path: Path) -> None:
    from pocketllm.cli.generate import read_constraint
    from pocketllm.errors import OptionError

    schema, latin = tmp_path / "schema.json", tmp_path / "latin.gbnf"
    schema.write_text('{"type": "boolean"}')
    latin.write_bytes(b'root ::= "\xe9"')

    assert takes(read_constraint(schema, None, None), "true")  # type: ignore[arg-type]  # a stand-in, or wrong on purpose
    assert takes(read_constraint(None, None, "ab"), "ab")  # type: ignore[arg-type]  # a stand-in, or wrong on purpose
    assert read_constraint(None, None, None) is None
    with pytest.raises(OptionError, match="not UTF-8"):
        read_constraint(None, latin, None)
    with pytest.raises(OptionError, match="cannot be read"):
        read_constraint(tmp_path / "none.json", None, None)
    with pytest.raises(OptionError, match="--json-schema and --regex"):
        read_constraint(schema, None, "a")
