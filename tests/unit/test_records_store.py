"""The store: nothing measured is lost, nothing written is edited, every file explains itself."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pocketllm.errors import RecordError
from pocketllm.evidence import pages, schema, store
from pocketllm.evidence.columns import COLUMNS
from pocketllm.evidence.journal import read_journal
from pocketllm.evidence.store import RecordWriter, keep, list_records, read_record, writing
from pocketllm.evidence.store.signals import ENDING, signals_held
from pocketllm.evidence.store.writing import CROCKFORD

DOCUMENT = {"device_class": "cpu", "model": {"name": "tiny", "sha256": "ab" * 32}}
ROW = {"case": "capital", "entry_point": "generate", "check": "tokens", "outcome": "IDENTICAL"}
BENCH = {"device_class": "cpu", "scenario": "decode", "arms": [], "schedule": [], "seed": 1}
BENCH_END = {"checks": [], "results": [], "valid": True, "null_valid": True, "served": False}


def golden(folder: Path, **document: Any) -> Path:
    with RecordWriter("golden", {**DOCUMENT, **document}, folder) as record:
        record.append(ROW)
    assert record.path is not None
    return record.path


def test_a_lone_file_explains_itself(tmp_path: Path) -> None:
    path = golden(tmp_path)

    document = json.loads(pq.read_metadata(path).metadata[schema.DOCUMENT_KEY])
    assert document["kind"] == "golden"
    assert document["schema"] == schema.SCHEMA_VERSION
    assert document["run_id"] == path.stem
    assert document["complete"] is True
    assert document["started_utc"] <= document["finished_utc"]
    assert document["tool"]["name"] == "pocketllm"
    assert {"argv", "code", "machine", "model", "device_class"} <= set(document)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_rows_come_back_with_every_column_and_their_run(tmp_path: Path) -> None:
    record = read_record(golden(tmp_path))

    assert list(record.rows.columns) == list(COLUMNS["golden"])
    assert record.rows.loc[0, "case"] == "capital"
    assert record.row_dicts[0]["run_id"] == record.run_id
    assert record.row_dicts[0]["margin"] is None


def test_ids_are_26_crockford_letters_that_sort_by_time() -> None:
    first = store.new_ulid()
    time.sleep(0.002)
    second = store.new_ulid()

    assert len(first) == 26
    assert set(first) <= set("0123456789ABCDEFGHJKMNPQRSTVWXYZ")
    assert first < second
    milliseconds = sum(CROCKFORD.index(letter) << 5 * place for place, letter in enumerate(reversed(first[:10])))
    assert abs(milliseconds / 1000 - time.time()) < 60


KILLED = """
import sys, time
from pathlib import Path
from pocketllm.evidence.store import RecordWriter
record = RecordWriter("golden", {"device_class": "cpu", "model": {"name": "tiny"}}, Path(sys.argv[1]))
for case in ("a", "b"):
    record.append({"case": case})
print("measured", flush=True)
time.sleep(60)
"""


def test_a_run_killed_midway_leaves_a_readable_record_marked_incomplete(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "measured\n"
    process.send_signal(signal.SIGKILL)
    process.wait()

    [record] = list_records([tmp_path])
    assert not record.complete
    assert record.document["complete"] is False
    assert [row["case"] for row in record.row_dicts] == ["a", "b"]
    assert list(read_record(record.run_id[:20], [tmp_path]).rows["case"]) == ["a", "b"]
    with pytest.raises(RecordError, match="incomplete"):
        keep(record.run_id, tmp_path / "records", [tmp_path])


def test_a_line_torn_by_the_kill_loses_itself_and_nothing_else(tmp_path: Path) -> None:
    record = RecordWriter("golden", DOCUMENT, tmp_path)
    record.append(ROW)
    journal = tmp_path / f"{record.run_id}.journal"
    with journal.open("a") as file:
        file.write('[{"case": "tor')

    assert [row["case"] for row in read_record(journal).row_dicts] == ["capital"]


def test_what_follows_a_damaged_line_of_a_journal_is_not_trusted(tmp_path: Path) -> None:
    record = RecordWriter("golden", DOCUMENT, tmp_path)
    record.append(ROW)
    journal = tmp_path / f"{record.run_id}.journal"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(lines[0] + lines[1][:40] + b"\n" + lines[1])

    assert read_record(journal).row_dicts == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupted_run_keeps_what_was_paid_for(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), RecordWriter("golden", DOCUMENT, tmp_path) as record:  # noqa: PT012  the writer must see it raised
        record.append(ROW)
        raise error

    [found] = list_records([tmp_path])
    assert found.path.suffix == ".parquet"
    assert not found.complete
    assert found.document["ended_by"] == error.__name__
    assert len(found.row_dicts) == 1


@pytest.fixture
def ended_by_signals() -> Iterator[None]:
    """Both signals end this process as they end a command, also where tests run in a shell's background."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_record_is_written_waits_until_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended_by_signals: None, number: signal.Signals
) -> None:
    written = writing.write_parquet

    def interrupted(*words: Any) -> None:
        signal.raise_signal(number)
        written(*words)

    monkeypatch.setattr(writing, "write_parquet", interrupted)
    with pytest.raises(KeyboardInterrupt), RecordWriter("golden", DOCUMENT, tmp_path) as record:
        record.append(ROW)

    assert [path.name for path in tmp_path.iterdir()] == [f"{record.run_id}.parquet"]
    assert list_records([tmp_path])[0].complete


def test_a_signal_while_a_record_is_begun_leaves_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended_by_signals: None
) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(KeyboardInterrupt):
        RecordWriter("golden", DOCUMENT, tmp_path)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("at_call", [1, 2, 3, 4])
def test_a_signal_while_handlers_are_changed_is_obeyed_and_none_of_ours_stays(
    monkeypatch: pytest.MonkeyPatch, ended_by_signals: None, at_call: int
) -> None:
    set_handler, calls = signal.signal, count(1)

    def disturbed(number: int, handler: Any) -> Any:
        before = set_handler(number, handler)
        if next(calls) == at_call:
            # the one that has its old handler: of two, the first is changed first
            signal.raise_signal(signal.SIGTERM if at_call == 1 else signal.SIGINT)
        return before

    monkeypatch.setattr(signal, "signal", disturbed)
    with pytest.raises(KeyboardInterrupt), signals_held():
        pass

    assert {signal.getsignal(number) for number in ENDING} == {signal.default_int_handler}


def test_a_signal_that_finds_our_handler_after_the_work_is_obeyed_as_before(
    monkeypatch: pytest.MonkeyPatch, ended_by_signals: None
) -> None:
    set_handler, calls = signal.signal, count(1)

    def disturbed(number: int, handler: Any) -> Any:
        if next(calls) == 3:  # the first that is put back
            signal.raise_signal(signal.SIGTERM)
        return set_handler(number, handler)

    monkeypatch.setattr(signal, "signal", disturbed)
    with pytest.raises(KeyboardInterrupt), signals_held():
        pass

    assert {signal.getsignal(number) for number in ENDING} == {signal.default_int_handler}


def test_a_record_is_written_from_any_thread_and_under_an_ignored_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    written = writing.write_parquet
    monkeypatch.setattr(writing, "write_parquet", lambda *words: (signal.raise_signal(signal.SIGTERM), written(*words)))
    try:
        paths = [golden(tmp_path)]
        with ThreadPoolExecutor(1) as pool:
            paths.append(pool.submit(golden, tmp_path).result())
    finally:
        signal.signal(signal.SIGTERM, before)

    assert all(read_record(path).complete for path in paths)


def test_a_bad_row_does_not_cost_the_good_ones(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no column"), RecordWriter("golden", DOCUMENT, tmp_path) as record:  # noqa: PT012  the writer must see it raised
        record.append(ROW)
        record.append({"csae": "capital"})

    assert [row["case"] for row in list_records([tmp_path])[0].row_dicts] == ["capital"]


def test_rows_appended_from_several_threads_are_all_there(tmp_path: Path) -> None:
    with RecordWriter("golden", DOCUMENT, tmp_path) as record, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: record.append([{**ROW, "n_out": n}, {**ROW, "n_out": n}]), range(20)))

    assert sorted(row["n_out"] for row in list_records([tmp_path])[0].row_dicts) == sorted([*range(20)] * 2)


def test_a_finished_record_takes_no_more_rows(tmp_path: Path) -> None:
    record = RecordWriter("golden", DOCUMENT, tmp_path)
    path = record.finish()

    assert record.finish() == path
    with pytest.raises(RecordError, match="never edited"):
        record.append(ROW)


def test_what_a_kind_must_say_is_asked_for_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="a bench document needs scenario, arms, schedule, seed"):
        RecordWriter("bench", {"device_class": "cpu"}, tmp_path)
    with pytest.raises(RecordError, match="'complete' is the writer's own"):
        RecordWriter("golden", {**DOCUMENT, "complete": True}, tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_a_run_that_forgets_its_results_is_saved_as_incomplete(tmp_path: Path) -> None:
    record = RecordWriter("bench", BENCH, tmp_path)
    with pytest.raises(RecordError, match="needs checks, results, valid, null_valid, served; saved as incomplete"):
        record.finish({})

    assert not list_records([tmp_path])[0].complete


def test_the_writer_s_own_keys_cannot_be_overwritten_at_the_end(tmp_path: Path) -> None:
    record = RecordWriter("golden", DOCUMENT, tmp_path)

    document = read_record(record.finish({"run_id": "mine", "started_utc": "never"})).document

    assert document["run_id"] == record.run_id
    assert document["started_utc"].startswith("20")


def test_paths_and_hosts_never_enter_a_record(tmp_path: Path) -> None:
    with RecordWriter("golden", {**DOCUMENT, "target": f"{tmp_path}/secret/model.gguf"}, tmp_path) as record:
        record.append({**ROW, "detail": f"cannot open {tmp_path}/model.gguf at http://me:pw@example.org:81/v1?key=1"})
        path = record.finish({"seen": [str(Path.home() / "model.gguf")]})

    assert str(tmp_path).encode() not in path.read_bytes()
    found = read_record(path)
    assert found.document["target"] == "model.gguf"
    assert found.document["seen"] == ["model.gguf"]
    assert "example.org" not in found.row_dicts[0]["detail"]
    assert "pw" not in found.row_dicts[0]["detail"]


# -- folders -----------------------------------------------------------------------------------------------------------
def test_records_land_in_the_working_directory_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    assert store.record_dir() == tmp_path / "records" / "local"
    assert (tmp_path / "records" / "local").is_dir()


def test_a_working_directory_that_cannot_be_written_sends_records_to_the_user_s_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "records").write_text("a file where the folder should be")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))

    assert store.record_dir() == tmp_path / "data" / "pocketllm" / "records"


def test_a_folder_that_cannot_be_written_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(RecordError, match=r"cannot write records to .*file.*--record-dir"):
        store.record_dir(tmp_path / "file" / "below")


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="no-read-only-folder: /proc/self")
def test_a_read_only_file_system_is_refused_even_for_root() -> None:
    with pytest.raises(RecordError, match="cannot write records"):
        store.record_dir(Path("/proc/self"))


# -- reading -----------------------------------------------------------------------------------------------------------
def test_an_ambiguous_prefix_lists_what_it_could_mean(tmp_path: Path) -> None:
    first, second = golden(tmp_path).stem, golden(tmp_path).stem

    with pytest.raises(RecordError) as refusal:
        read_record(first[:4], [tmp_path])
    assert first in str(refusal.value)
    assert second in str(refusal.value)
    assert read_record(first.lower(), [tmp_path]).run_id == first


@pytest.mark.parametrize("wanted", ["ZZZZ", "", "  "])
def test_an_unknown_id_says_how_to_list_the_known(tmp_path: Path, wanted: str) -> None:
    golden(tmp_path)

    with pytest.raises(RecordError, match="records ls"):
        read_record(wanted, [tmp_path])


def broken(folder: Path) -> dict[str, Path]:
    good = golden(folder / "good").read_bytes()
    files = {
        "empty": b"",
        "text": b"this is no parquet file, but long enough to be taken for one",
        "truncated": good[: len(good) // 2],
    }
    for name, data in files.items():
        (folder / f"{name}.parquet").write_bytes(data)
    pq.write_table(pa.table({"x": [1]}), folder / "foreign.parquet")
    document = {schema.DOCUMENT_KEY: b'{"kind": "poem"}'}
    pq.write_table(pa.table({"x": [1]}).replace_schema_metadata(document), folder / "unknown.parquet")
    document = {schema.DOCUMENT_KEY: b"not json"}
    pq.write_table(pa.table({"x": [1]}).replace_schema_metadata(document), folder / "garbled.parquet")
    (folder / "blank.journal").write_bytes(b"")
    (folder / "list.journal").write_bytes(b"[]\n")
    return {path.name: path for path in folder.iterdir() if path.is_file()}


def test_a_broken_or_foreign_file_is_refused_in_one_sentence(tmp_path: Path) -> None:
    files = broken(tmp_path)

    assert len(files) == 8
    for name, path in files.items():
        with pytest.raises(RecordError) as refusal:
            read_record(path)
        assert name in str(refusal.value)
        assert "\n" not in str(refusal.value)
    with pytest.raises(RecordError, match="no record file"):
        read_record(tmp_path / "missing.parquet")


def test_a_folder_in_a_record_s_place_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "folder.parquet").mkdir()

    with pytest.raises(RecordError, match=r"cannot read .*folder\.parquet"):
        read_record(tmp_path / "folder.parquet")


def test_a_record_of_a_later_generation_is_refused_and_of_a_later_version_read(tmp_path: Path) -> None:
    path = golden(tmp_path)
    table = pq.read_table(path)
    document = json.loads(table.schema.metadata[schema.DOCUMENT_KEY])

    def rewrite(version: str) -> None:
        text = json.dumps({**document, "schema": version})
        pq.write_table(table.replace_schema_metadata({schema.DOCUMENT_KEY: text}), path)

    rewrite("1.9")
    assert read_record(path).document["schema"] == "1.9"
    rewrite("2.0")
    with pytest.raises(RecordError, match=r"has schema 2\.0.*newer"):
        read_record(path)


def test_listing_tells_of_a_broken_file_and_goes_on_when_asked(tmp_path: Path) -> None:
    broken(tmp_path)
    problems: list[RecordError] = []

    found = list_records([tmp_path], on_problem=problems.append)

    assert len(found) == 1
    assert len(problems) == 8
    with pytest.raises(RecordError):
        list_records([tmp_path])


def test_rows_damaged_behind_a_good_document_are_refused_in_one_sentence(tmp_path: Path) -> None:
    path = golden(tmp_path)
    data = bytearray(path.read_bytes())
    data[4:60] = bytes(56)
    path.write_bytes(data)

    with pytest.raises(RecordError, match="broken Parquet file"):
        _ = read_record(path).row_dicts


@cache
def good_bytes() -> tuple[bytes, bytes]:
    """A journal of three appends, and the Parquet file of the same run."""
    with tempfile.TemporaryDirectory() as folder:
        record = RecordWriter("golden", DOCUMENT, Path(folder))
        for number in range(3):
            record.append({**ROW, "n_out": number})
        journal = (Path(folder) / f"{record.run_id}.journal").read_bytes()
        return journal, record.finish().read_bytes()


def refusal_of(data: bytes) -> str | None:
    """What reading a file of these bytes is refused with; None when its page can be shown."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.parquet"
        path.write_bytes(data)
        try:
            return None if pages.page(read_record(path)) else ""
        except RecordError as error:
            return str(error)


@settings(max_examples=100, deadline=None)
@given(flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=3))
def test_a_file_damaged_anywhere_reads_or_is_refused_in_one_sentence(flips: list[tuple[float, int]]) -> None:
    data = bytearray(good_bytes()[1])
    for place, value in flips:
        data[int(place * len(data))] = value

    refusal = refusal_of(bytes(data))

    assert refusal is None or (refusal and "\n" not in refusal)


def test_a_damaged_column_name_is_refused_in_one_sentence() -> None:
    data = good_bytes()[1].replace(b"concurrency", b"c\xdcncurrency")

    assert "is not a Parquet file" in str(refusal_of(data))


@settings(max_examples=100, deadline=None)
@given(cut=st.floats(0, 1))
def test_a_journal_cut_anywhere_keeps_every_whole_line_before_the_cut(cut: float) -> None:
    data = good_bytes()[0]
    left = data[: int(cut * len(data))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.journal"
        path.write_bytes(left)
        try:
            rows = read_record(path).row_dicts
        except RecordError:
            rows = None

    # a last line that only lacks its line end counts too: nothing of it is missing
    num_lines = (left + b"\n" * (left + b"\n" in (data[: len(left) + 1],))).count(b"\n")
    assert (rows is None) == (num_lines == 0)
    assert rows is None or [row["n_out"] for row in rows] == list(range(num_lines - 1))


def test_text_that_is_not_utf8_is_damage_and_not_a_traceback(tmp_path: Path) -> None:
    path = golden(tmp_path)
    table = pq.read_table(path)
    bad = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")])
    table = table.set_column(table.schema.get_field_index("case"), "case", bad)
    pq.write_table(table, path)

    with pytest.raises(RecordError, match="broken Parquet file"):
        _ = read_record(path).row_dicts


def test_a_column_of_another_type_is_refused_by_the_frame(tmp_path: Path) -> None:
    path = golden(tmp_path)
    table = pq.read_table(path)
    table = table.set_column(table.schema.get_field_index("n_out"), "n_out", pa.array(["many"]))
    pq.write_table(table, path)

    with pytest.raises(RecordError, match="do not fit together"):
        _ = read_record(path).rows


def test_a_journal_left_behind_beside_its_finished_file_is_not_a_second_run(tmp_path: Path) -> None:
    record = RecordWriter("golden", DOCUMENT, tmp_path)
    shutil.copy(tmp_path / f"{record.run_id}.journal", tmp_path / "copy")
    record.finish()
    (tmp_path / "copy").rename(tmp_path / f"{record.run_id}.journal")

    [found] = list_records([tmp_path])
    assert found.complete


def test_kinds_are_listed_apart(tmp_path: Path) -> None:
    golden(tmp_path)
    RecordWriter("bench", BENCH, tmp_path).finish(BENCH_END)

    assert [record.kind for record in list_records([tmp_path])] == ["golden", "bench"]
    assert [record.kind for record in list_records([tmp_path], kind="bench")] == ["bench"]


# -- keeping -----------------------------------------------------------------------------------------------------------
def test_keep_copies_a_record_unchanged_to_its_kind_and_year(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    local = golden(store.record_dir())

    kept = keep(local.stem)

    year = read_record(local).document["started_utc"][:4]
    assert kept == tmp_path / "records" / "golden" / f"year={year}" / local.name
    assert kept.read_bytes() == local.read_bytes()
    assert keep(local.stem) == kept
    assert [record.path for record in list_records(store.search_dirs())] == [kept]
    assert "year" not in read_record(kept).rows.columns


def test_keep_never_overwrites_a_record_that_differs(tmp_path: Path) -> None:
    local = golden(tmp_path / "local")
    kept = keep(local, tmp_path / "records")
    kept.write_bytes(golden(tmp_path / "other").read_bytes())

    with pytest.raises(RecordError, match="never edited"):
        keep(local, tmp_path / "records")


def test_an_invalid_bench_run_is_kept_only_when_forced(tmp_path: Path) -> None:
    path = RecordWriter("bench", BENCH, tmp_path).finish({**BENCH_END, "valid": False})

    with pytest.raises(RecordError, match=r"INVALID.*--force"):
        keep(path, tmp_path / "records")
    assert keep(path, tmp_path / "records", force=True).is_file()


def test_a_golden_regression_is_evidence_and_may_be_kept(tmp_path: Path) -> None:
    with RecordWriter("golden", DOCUMENT, tmp_path) as record:
        record.append({**ROW, "outcome": "REGRESSION"})
        path = record.finish()

    assert keep(path, tmp_path / "records").is_file()


def test_importing_the_store_needs_neither_pandas_nor_pyarrow() -> None:
    code = "import sys, pocketllm.evidence.ladder; print({'numpy', 'pandas', 'pyarrow'} & {*sys.modules})"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True)

    assert done.stdout.strip() == "set()"


def bench_with(folder: Path, change: dict[str, Any]) -> Path:
    """A bench record whose document was changed afterwards, digest and all."""
    with RecordWriter("bench", BENCH, folder) as record:
        path = record.finish(BENCH_END)
    document = {**json.loads(pq.read_metadata(path).metadata[schema.DOCUMENT_KEY]), **change}
    text = json.dumps(document).encode()
    metadata = {schema.DOCUMENT_KEY: text, schema.DIGEST_KEY: schema.document_sha256(text)}
    pq.write_table(pq.read_table(path).replace_schema_metadata(metadata), path)
    return path


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"kind": ["bench"]}, "no known kind"),
        ({"schema": "2.0"}, "use a newer one"),
        ({"arms": {"a": 1}}, "arms is {'a': 1}"),
        ({"arms": [{"name": "a", "role": "boss"}]}, "arms[0].role is 'boss'"),
        ({"arms": [{"role": "null"}]}, "arms[0] has no name"),
        ({"results": [{"metric": "decode"}]}, "results[0] has no arm"),
        ({"medians": {"decode": {"base": "fast"}}}, "medians.decode.base is 'fast'"),
        ({"machine": {"hard": [1]}}, "machine.hard is [1]"),
        ({"blocks": True}, "blocks is True"),
        ({"notes": ["\ud800"]}, "not JSON"),
    ],
)
def test_a_document_that_no_reader_could_use_is_refused_by_its_place(
    tmp_path: Path, change: dict[str, Any], wrong: str
) -> None:
    path = bench_with(tmp_path, change)

    with pytest.raises(RecordError) as refusal:
        read_record(path)
    assert wrong in str(refusal.value)
    assert path.name in str(refusal.value)


def test_keys_that_a_later_version_added_are_no_damage(tmp_path: Path) -> None:
    change = {"mood": ["good"], "arms": [{"name": "a", "role": "null", "new": {"deep": [1]}, "plan": None}]}

    assert read_record(bench_with(tmp_path, change)).document["mood"] == ["good"]


@pytest.mark.parametrize("change", [{"run_id": "../../../out"}, {"started_utc": "../x"}, {"started_utc": None}])
def test_a_record_is_not_kept_under_a_name_that_leads_elsewhere(tmp_path: Path, change: dict[str, Any]) -> None:
    path = bench_with(tmp_path / "in", change)

    with pytest.raises(RecordError, match="it is not ours"):
        keep(path, tmp_path / "records")
    assert not (tmp_path / "records").exists()
    assert not list(tmp_path.glob("*.parquet"))


def test_a_journal_is_read_up_to_a_line_that_nobody_wrote_or_refused(tmp_path: Path) -> None:
    writer = RecordWriter("golden", DOCUMENT, tmp_path)
    writer.append(ROW)
    path = tmp_path / f"{writer.run_id}.journal"
    whole = path.read_text()

    for line in ('["no row"]', "[" * 100_000):
        path.write_text(whole + line + "\n")
        assert list(read_record(path).rows["case"]) == ["capital"]
    path.write_text(whole + '[{"position": "here"}]\n')
    with pytest.raises(RecordError, match="do not fit together"):
        _ = read_record(path).rows


# -- a disk that is full -----------------------------------------------------------------------------------------------


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_record_that_finds_no_room_to_begin_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", full)

    with pytest.raises(RecordError, match=r"cannot write .*\.journal: No space left on device; free some space"):
        RecordWriter("golden", DOCUMENT, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_while_a_run_goes_on_keeps_what_was_paid_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RecordError, match=r"cannot write .*: No space left on device"):  # noqa: PT012, SIM117  # the limit must hold around it all
        with RecordWriter("golden", DOCUMENT, tmp_path) as record:
            record.append(ROW)
            monkeypatch.setattr(os, "fsync", full)
            record.append({**ROW, "case": "other"})

    assert [path.suffix for path in tmp_path.iterdir()] == [".journal"]
    [kept] = list_records([tmp_path])
    assert not kept.complete
    assert kept.row_dicts[0]["case"] == "capital"


def test_a_disk_without_room_for_the_finished_record_leaves_the_journal_and_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = RecordWriter("golden", DOCUMENT, tmp_path)
    record.append(ROW)
    monkeypatch.setattr(pq, "write_table", full)

    with pytest.raises(RecordError, match=r"No space left on device; what was measured is in .*\.journal"):
        record.finish()
    assert [path.suffix for path in tmp_path.iterdir()] == [".journal"]
    assert not list_records([tmp_path])[0].complete


def test_what_a_full_disk_had_no_room_for_is_no_line_of_the_journal(tmp_path: Path) -> None:
    """The kernel's own refusal: a limit on the size of a file ends a write in the middle."""
    code = f"""
import resource, signal
from pathlib import Path
from pocketllm.evidence.journal import Journal
from pocketllm.errors import RecordError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
journal = Journal(Path({str(tmp_path / "run.journal")!r}), {{"kind": "golden"}})
journal.write([{{"case": "whole"}}])
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
try:
    journal.write([{{"case": "x" * 200}}])
except RecordError as error:
    print(error)
journal.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "cannot write" in done.stdout
    assert (tmp_path / "run.journal").stat().st_size == 100  # half a line is there
    assert read_journal(tmp_path / "run.journal")[1] == [{"case": "whole"}]
