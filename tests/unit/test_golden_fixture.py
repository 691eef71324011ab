"""Fixtures: what is written is read back, and what a hand has broken is refused by file and key."""

import errno
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pocketllm.errors import RecordError
from pocketllm.golden.files.document import answer_document, case_document, parse_answer, parse_case
from pocketllm.golden.files.fields import render
from pocketllm.golden.files.folder import FixtureFolder, check_name
from pocketllm.golden.fixture import (
    Answer,
    Case,
    Expected,
    Floor,
    HardKey,
    Noise,
    Position,
    ServedPath,
)

KEY = HardKey("cpu", "reference", "1", ("F32", "Q4_1"), "a" * 64, "b" * 64)
CHAT = Case(
    name="capital",
    purpose="a short chat",
    kind="chat",
    messages=({"role": "user", "content": "Capital of France? 日本 🙂"},),
    prompt="",
    sampling={"max_tokens": 8, "temperature": 0.0, "stop": ["\n\n"]},
    paths=(ServedPath("http_chat"), ServedPath("http_chat", True, 2), ServedPath("generate")),
    template_sha256="c" * 64,
    rendered_sha256="d" * 64,
    prompt_token_ids=tuple(range(100, 160)),
)
ANSWER = Answer(
    case="capital",
    request_sha256=CHAT.request_sha256,
    hard_key=KEY,
    expected=Expected((5, 6, 7), "Par\nis\u2028", "stop", 60, 3),
    positions=(
        Position(-0.1, 2.0, (5, 9), (-0.1, -2.1)),
        Position(-0.5, 0.25, (6, 8), (-0.5, -0.75)),
        Position(-0.3, 1.0, (7, 2), (-0.3, -1.3)),
    ),
    noise=Noise(3, True, ("scored", "width 2"), Floor(1e-5, 4e-5), Floor(2e-5, 6e-5)),
    soft={"device": "some cpu", "torch": "2.13.0"},
    provenance={"command": "pocketllm golden record", "commit": None, "dirty": False, "recorded_utc": "2026"},
)


def test_a_case_and_its_answer_are_read_back_as_they_were_written() -> None:
    assert parse_case(render(case_document(CHAT)), "capital.json") == CHAT
    assert parse_answer(render(answer_document(ANSWER)), "capital.cpu-reference.json") == ANSWER


def test_files_are_written_for_a_reviewer() -> None:
    lines = render(answer_document(ANSWER)).splitlines() + render(case_document(CHAT)).splitlines()

    assert max(map(len, lines)) <= 120
    assert sum(line.lstrip().startswith('{"logprob"') for line in lines) == len(ANSWER.positions)
    assert any("日本 🙂" in line for line in lines)
    assert len([line for line in lines if "100, 101" in line or "159" in line]) == 2


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=40) | st.dictionaries(st.text(), inner, max_size=5),
        max_leaves=60,
    )
)
def test_whatever_is_rendered_is_the_same_json(value: Any) -> None:
    assert json.loads(render({"value": value})) == {"value": value}


@given(st.lists(st.integers(0, 300_000), max_size=300))
def test_wrapped_ids_stay_the_same_ids(ids: list[int]) -> None:
    text = render({"ids": ids})

    assert json.loads(text)["ids"] == ids
    assert max(map(len, text.splitlines())) <= 120


def broken(document: dict[str, Any], **changes: Any) -> str:
    for path, value in changes.items():
        *parents, last = path.split("__")
        inner = document
        for parent in parents:
            inner = inner[parent]
        if value is ...:
            del inner[last]
        else:
            inner[last] = value
    return render(document)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"schema": 2}, "schema"),
        ({"case": ""}, "case"),
        ({"kind": "story"}, "kind"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.content"),
        ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages.name"),
        ({"sampling__max_tokens": ...}, "sampling.max_tokens"),
        ({"sampling__max_tokens": 0}, "sampling.max_tokens"),
        ({"sampling__max_tokens": "8"}, "sampling.max_tokens"),
        ({"sampling__temperature": ...}, "sampling.temperature"),
        ({"sampling__temperature": 0.7}, "sampling.seed"),
        ({"sampling__beams": 4}, "sampling.beams"),
        ({"paths": []}, "paths"),
        ({"paths": ["http_chat", "http_chat"]}, "paths"),
        ({"paths": ["telnet"]}, "paths"),
        ({"paths": ["http_completions"]}, "paths"),
        ({"paths": ["in_process@2"]}, "paths"),
        ({"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]}, "paths"),
        ({"sampling__stop_token_ids": [3]}, "paths"),
        ({"paths": ["http_chat@9"]}, "paths"),
        ({"paths": ["http_chat@0"]}, "paths"),
        ({"paths": ["http_chat:late"]}, "paths"),
        ({"paths": ["http_chat:warm:warm"]}, "paths"),
        ({"paths": ["http_chat:warm@2"]}, "paths"),
        ({"paths": ["generate:warm"]}, "paths"),
        ({"tags": ["odd"]}, "tags"),
        ({"template_sha256": ...}, "template_sha256"),
        ({"rendered_sha256": "d" * 63}, "rendered_sha256"),
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"prompt_token_ids": [1, -2]}, "prompt_token_ids"),
        ({"prompt_token_ids": [1, True]}, "prompt_token_ids"),
        ({"prompt_token_ids": "1 2"}, "prompt_token_ids"),
        ({"colour": "blue"}, "colour"),
    ],
)
def test_a_broken_case_is_refused_by_file_and_key(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(RecordError) as caught:
        parse_case(broken(case_document(CHAT), **changes), "smollm/capital.json")

    assert str(caught.value).startswith(f"smollm/capital.json: {named}: ")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hard_key__backend": ...}, "hard_key.backend"),
        ({"hard_key__weights_sha256": "zz"}, "hard_key.weights_sha256"),
        ({"hard_key__cpu": "x"}, "hard_key.cpu"),
        ({"expected__finish_reason": "tired"}, "expected.finish_reason"),
        ({"expected__token_ids": [5, 6]}, "expected.token_ids"),
        ({"expected__usage__prompt_tokens": 1.5}, "expected.usage.prompt_tokens"),
        ({"noise__bit_identical": 1}, "noise.bit_identical"),
        ({"noise__floor": ...}, "noise.floor"),
        ({"noise__floor__p99": "small"}, "noise.floor.p99"),
        ({"noise__reference__median": 1.0}, "noise.reference.median"),
        ({"schema": 1}, "schema"),
        ({"positions": []}, "positions"),
        ({"request_sha256": ...}, "request_sha256"),
    ],
)
def test_a_broken_answer_is_refused_by_file_and_key(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(RecordError) as caught:
        parse_answer(broken(answer_document(ANSWER), **changes), "f.json")

    assert str(caught.value).startswith(f"f.json: {named}: ")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"schema": 1, "schema": 1}', '{"schema": NaN}'])
def test_what_is_not_one_json_object_is_refused_by_file(text: str) -> None:
    with pytest.raises(RecordError, match=r"^f\.json: "):
        parse_case(text, "f.json")


@pytest.mark.parametrize(
    "text",
    [
        *("http_chat", "http_chat:stream", "http_completions:stream@2", "http_chat@8", "in_process", "generate"),
        *("in_process:warm", "http_chat:warm", "http_completions:stream:warm"),
    ],
)
def test_a_path_is_written_as_it_is_read(text: str) -> None:
    assert str(ServedPath.parse(text)) == text


def folder_with(tmp_path: Path, answer: Answer = ANSWER, case: Case = CHAT) -> FixtureFolder:
    folder = FixtureFolder(tmp_path / "smollm")
    for file in (folder.write_case(case), folder.write_answer(answer)):
        file.rename(file.with_suffix(""))
    return folder


def test_the_answer_of_this_hard_key_is_found(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)

    assert folder.cases() == [CHAT]
    assert folder.answer(CHAT, KEY) == (ANSWER, "")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"weights_sha256": "e" * 64}, "weights_sha256"),
        ({"tokenizer_sha256": "e" * 64}, "tokenizer_sha256"),
        ({"numerics_version": "2"}, "numerics_version"),
        ({"quant_types": ("F32",)}, "quant_types"),
        ({"backend": "native"}, "native"),
        ({"device_kind": "other"}, "other"),
    ],
)
def test_an_answer_of_another_hard_key_is_never_used(tmp_path: Path, change: dict[str, Any], word: str) -> None:
    answer, reason = folder_with(tmp_path).answer(CHAT, replace(KEY, **change))

    assert answer is None
    assert word in reason


def test_an_answer_to_another_request_is_never_used(tmp_path: Path) -> None:
    longer = replace(CHAT, sampling={**CHAT.sampling, "max_tokens": 9})

    answer, reason = folder_with(tmp_path, case=longer).answer(longer, KEY)

    assert answer is None
    assert "changed after" in reason


def test_more_ways_of_asking_do_not_ask_for_another_answer(tmp_path: Path) -> None:
    wider = replace(CHAT, paths=(*CHAT.paths, ServedPath("in_process")), purpose="another word")

    assert folder_with(tmp_path, case=wider).answer(wider, KEY)[0] == ANSWER


def test_a_proposal_is_no_fixture(tmp_path: Path) -> None:
    folder = FixtureFolder(tmp_path / "smollm")
    folder.write_case(CHAT)
    folder.write_answer(ANSWER)

    assert folder.names() == []
    assert folder.pending_names() == ["capital"]
    assert folder.pending_answer("capital", KEY) == ANSWER
    with pytest.raises(RecordError, match=r"case 'capital' .* proposed and not accepted: `pocketllm golden accept`"):
        folder.cases(["capital"])


def test_a_file_under_another_name_is_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    (folder.path / "capital.json").rename(folder.path / "other.json")

    with pytest.raises(RecordError, match="case: is 'capital', the file's name says 'other'"):
        folder.cases()


@pytest.mark.parametrize("name", ["", "../x", "a.b", "A", "-x", "x/y"])
def test_a_case_name_is_a_plain_file_name(name: str) -> None:
    with pytest.raises(RecordError):
        check_name(name)


@pytest.mark.parametrize(
    ("folder", "named"),
    [
        ("records/fixtures/smollm", "records/fixtures/smollm"),
        ("/home/ann/records/fixtures/smollm", "fixtures/smollm"),
        ("../ann/fixtures/smollm", "fixtures/smollm"),
    ],
)
def test_a_folder_is_named_as_it_is_reached_from_here_and_no_folder_of_a_machine_is(folder: str, named: str) -> None:
    assert FixtureFolder(Path(folder)).label() == named


def test_the_smallest_margin_is_that_of_the_least_certain_token() -> None:
    assert ANSWER.smallest_margin == 0.25
    assert replace(ANSWER, positions=()).smallest_margin == math.inf


@pytest.mark.parametrize(
    ("device_kind", "backend", "label"),
    [("cpu", "cpu", "cpu"), ("cpu", "reference", "cpu-reference"), ("cuda:NVIDIA H200", "cuda", "cuda-nvidia-h200")],
)
def test_an_answer_is_filed_under_its_device_and_backend(device_kind: str, backend: str, label: str) -> None:
    assert replace(KEY, device_kind=device_kind, backend=backend).label == label


def test_only_an_answer_of_another_engine_may_be_without_ids_and_logprobs() -> None:
    text_only = replace(ANSWER, expected=replace(ANSWER.expected, token_ids=()), positions=())
    foreign = replace(text_only, hard_key=replace(KEY, device_kind="url", backend="llama.cpp"))

    assert parse_answer(render(answer_document(foreign)), "f.json") == foreign
    with pytest.raises(RecordError, match=r"f\.json: positions: is empty"):
        parse_answer(render(answer_document(text_only)), "f.json")


def test_answers_that_no_case_asks_for_any_more_are_stale(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    assert folder.stale() == []

    (folder.path / "gone.cpu-reference.json").write_text(render(answer_document(replace(ANSWER, case="gone"))))
    longer = replace(CHAT, sampling={**CHAT.sampling, "max_tokens": 9})
    (folder.path / "capital.json").write_text(render(case_document(longer)))

    assert [file.path.name for file in folder.stale()] == ["capital.cpu-reference.json", "gone.cpu-reference.json"]
    assert [file.path.name for file in folder.stale(["gone"])] == ["gone.cpu-reference.json"]


# -- a disk that is full -----------------------------------------------------------------------------------------------


def test_a_proposal_that_finds_no_room_leaves_the_one_before_it_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = FixtureFolder(tmp_path / "suite")
    file = folder.write_answer(ANSWER)
    before = file.read_bytes()

    def half(path: Path, text: str, encoding: str) -> None:
        path.write_bytes(text.encode(encoding)[: len(text) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", half)

    with pytest.raises(RecordError, match=r"cannot write .*pending: No space left on device"):
        folder.write_answer(ANSWER)
    assert file.read_bytes() == before
    assert list(folder.path.iterdir()) == [file]


def test_fixtures_that_cannot_be_written_are_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder", encoding="utf-8")

    with pytest.raises(RecordError, match=r"^cannot write .*capital.json.*; choose another --fixtures$"):
        FixtureFolder(tmp_path / "file").write_case(CHAT)
