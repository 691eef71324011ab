"""`pocketllm models`: the ladder matrix, the pages held to it, and the cache."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from pocketllm.cli.main import app
from pocketllm.engine.weights import catalog
from pocketllm.errors import RecordError
from pocketllm.evidence.ladder import Evidence, LadderRow
from pocketllm.evidence.model_pages import Source, regenerate
from pocketllm.evidence.model_pages.claims import discrepancies, overclaims
from pocketllm.evidence.store import RecordWriter, keep
from tests.suites import write_suite

ROOT = Path(__file__).resolve().parents[2]
RUNNER = CliRunner()
SHA = catalog.CATALOG["smollm2-135m"].sha256
MACHINE = {"cpu": "Z80", "cores_usable": 1}
PROVENANCE = {"tool": {"name": "pocketllm"}, "argv": [], "code": {}, "machine": {"hard": MACHINE}}
"""Given, so that it is not read for every record anew."""
MODEL = {"name": "SmolLM2-copy", "sha256": SHA, "architecture": "llama", "quant_types": ["F32", "Q4_1"]}


def call(*words: str, expected: int = 0) -> Any:
    result = RUNNER.invoke(app, ["models", *words], catch_exceptions=False)
    assert result.exit_code == expected, result.output
    return result


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory and a cache with nothing in them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POCKETLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path


def kept(kind: str, rows: list[dict[str, Any]], end: dict[str, Any] | None = None, **document: Any) -> str:
    """A record written and kept under ./records, as the commands do it."""
    given = {"device_class": "cpu", "model": MODEL, **PROVENANCE, **document}
    with RecordWriter(kind, given, Path("records/local")) as record:
        record.append(rows)
        path = record.finish(end)
    keep(path)
    return record.run_id


def bench(served: bool, **more: Any) -> str:
    return kept(
        "bench",
        [{"arm": "base"}],
        {
            "checks": [],
            "results": [
                {"metric": "prefill", "arm": "peer", "role": "candidate", "ratio": 0.5, "low": 0.49, "high": 0.51}
                | {"verdict": "FASTER"}
            ],
            "medians": {"prefill": {"base": 0.002, "peer": 0.001}},
            "valid": True,
            "null_valid": True,
            "served": served,
            **more,
        },
        scenario="prefill",
        workload={"n_prompt": 256, "n_out": 1},
        arms=[{"name": "base", "role": "baseline"}, {"name": "peer", "role": "candidate"}],
        schedule=[],
        seed=1,
    )


def golden(outcome: str = "IDENTICAL") -> str:
    row = {"case": "capital", "check": "tokens", "stream": False, "concurrency": 1, "outcome": outcome}
    http = {**row, "entry_point": "http_chat"}
    return kept(
        "golden",
        [
            {**row, "entry_point": "generate"},
            http,
            {**http, "stream": True, "concurrency": 2},
            {**http, "check": "cancel"},
            {**http, "check": "shutdown"},
        ],
    )


def prove_rung_4() -> list[str]:
    write_suite(Path("records/fixtures") / str(MODEL["name"]))
    parity = {"subject": "logits", "oracle": "float", "n": 512, "kl": 1e-7, "passed": True}
    ids = [kept("inspect", [], {"report": {"errors": []}}), kept("parity", [parity]), golden()]
    return [*ids, bench(served=True)]


PAGE = """# A page

<!-- generated: ladder smollm2-135m -->
outdated
<!-- end -->

between

<!-- generated: performance smollm2-135m -->
<!-- end -->
"""


def pages(text: str = PAGE, name: str = "smollm2-135m.md") -> Path:
    page = Path("docs/models") / name
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text)
    return page


# -- the matrix --------------------------------------------------------------------------------------------------------
def test_catalog_models_without_records_are_unproven(folder: Path) -> None:
    result = call()

    assert [line.split()[:4] for line in result.stdout.splitlines()[1:]] == [
        [name, "any", "0", "unproven"] for name in catalog.CATALOG
    ]
    assert "without records nothing is proved" in result.stderr


def test_the_matrix_shows_rung_and_proofs_under_the_catalog_s_name(folder: Path) -> None:
    ids = prove_rung_4()

    text = call().stdout

    assert "smollm2-135m  llama         cpu     4 text + server" in text
    assert "SmolLM2-copy" not in text
    assert all(run_id in text for run_id in ids)
    rows = {row["model"]: row for row in json.loads(call("--json").stdout)}
    assert (rows["smollm2-135m"]["rung"], rows["smollm2-135m"]["words"]) == (4, "text + server")
    assert rows["gemma3-270m"]["rung"] == 0


def test_showing_a_model_tells_its_proofs_and_what_the_next_rung_lacks(folder: Path) -> None:
    run_id = kept("inspect", [], {"report": {"errors": []}})

    text = call("show", "smollm2-135m").stdout

    assert "cpu: rung 1 of 4, inspect only; freshness unknown" in text
    assert re.search(rf"1  inspect without errors +{run_id}  unknown", text)
    assert "next: a parity record of family llama" in text
    assert "pocketllm models pull smollm2-135m" in text
    assert json.loads(call("show", "smollm2-135m", "--json").stdout)["ladder"][0]["rung"] == 1


def test_another_machine_is_told_beside_what_was_proved_on_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prove_rung_4()
    assert "proved on Z80, 1 core; here " in " ".join(call("show", "smollm2-135m").stdout.split())

    monkeypatch.setattr("pocketllm.evidence.provenance.machine.hard_facts", lambda: MACHINE)

    assert "; here " not in call("show", "smollm2-135m").stdout


def test_a_run_with_an_arm_slowed_on_purpose_is_no_speed_of_the_model() -> None:
    plain = {"arms": [{"name": "base", "options": {}}, {"name": "peer", "options": {"prefill_chunk": 64}}, {}]}
    slowed = {"arms": [{"name": "base", "options": {}}, {"name": "slow", "options": {"test_step_delay": 0.05}}]}

    staged = [Evidence("0", "bench", document, ()).is_staged for document in (plain, slowed, {})]

    assert staged == [False, True, False]


def test_an_unknown_model_is_refused_with_the_known_ones(folder: Path) -> None:
    assert "known: smollm2-135m, gemma3-270m" in call("show", "smol", expected=2).stderr


@pytest.mark.parametrize("words", [(), ("show", "smollm2-135m"), ("check",), ("docs",)])
def test_a_folder_of_records_that_is_named_and_not_there_is_refused_and_no_table_is_emptied(
    folder: Path, words: tuple[str, ...]
) -> None:
    page = folder / "docs/models/smollm2-135m.md"
    page.parent.mkdir(parents=True)
    page.write_text("<!-- generated: matrix smollm2-135m -->\n\nold\n\n<!-- end -->\n", encoding="utf-8")

    assert "recrods is no folder" in call(*words, "--records", "recrods", expected=2).stderr
    assert "old" in page.read_text(encoding="utf-8")


def test_a_record_that_cannot_be_read_is_an_error_and_not_a_lower_rung(folder: Path) -> None:
    prove_rung_4()
    next(Path("records/parity").rglob("*.parquet")).write_text("no parquet")

    assert "is not a Parquet file" in call(expected=2).stderr


# -- the pages ---------------------------------------------------------------------------------------------------------
def test_the_tables_of_a_page_are_written_from_records_and_pass_the_check(folder: Path) -> None:
    ids = prove_rung_4()
    page = pages()

    assert call("docs").stdout.strip() == page.as_posix()

    text = page.read_text()
    assert "outdated" not in text
    assert "between" in text
    assert "| `smollm2-135m` | llama | cpu | 4 text + server |" in text
    assert "**prefill, 256 in / 1 out** on `cpu`, over HTTP" in text
    assert "| prefill | base | 500.0 tokens/s | 1 | baseline |" in text
    assert "| prefill | peer | 1000.0 tokens/s | 0.500× (0.490–0.510) | FASTER |" in text
    for run_id in ids:
        assert f"][{run_id[:16]}]" in text
        target = text.split(f"[{run_id[:16]}]: ")[1].split("\n")[0]
        assert (page.parent / target).is_file()
    assert call("docs").stdout == ""
    call("check")


def test_only_the_newest_of_equal_runs_and_no_invalid_one_stands_in_the_table(folder: Path) -> None:
    old = bench(served=False)
    new = bench(served=False)
    document = {"device_class": "cpu", "model": MODEL, "scenario": "x", "arms": [], "schedule": [], "seed": 1}
    with RecordWriter("bench", document, Path("records/local")) as record:
        end = {"checks": [], "results": [], "valid": False, "null_valid": False, "served": False}
        invalid = keep(record.finish({**end, "medians": {"prefill": {"base": 0.002}}}), force=True)
    page = pages()

    call("docs")

    text = page.read_text()
    assert f"/{new}.parquet" in text
    assert f"/{old}.parquet" not in text
    assert invalid.name not in text


def test_a_page_that_claims_what_was_later_disproved_fails_the_check(folder: Path) -> None:
    prove_rung_4()
    pages()
    call("docs")
    golden("REGRESSION")

    result = call("check", expected=1)

    assert "claims rung 4 (text + server) for smollm2-135m on cpu, records prove 2 (experimental)" in result.stdout


@pytest.mark.parametrize("place", range(4))
def test_deleting_a_record_demotes_and_the_page_then_claims_too_much(folder: Path, place: int) -> None:
    ids = prove_rung_4()
    pages()
    call("docs")
    [path] = Path("records").glob(f"*/year=*/{ids[place]}.parquet")
    path.unlink()

    rows = {row["model"]: row for row in json.loads(call("--json").stdout)}
    assert rows["smollm2-135m"]["rung"] == (0, 1, 2, 2)[place]
    assert "claims rung 4 (text + server) for smollm2-135m" in call("check", expected=1).stdout


@pytest.mark.parametrize(
    ("old", "new"),
    [("500.0 tokens/s", "900.0 tokens/s"), ("0.500×", "0.100×"), ("FASTER", "SAME"), ("cpu |", "gpu |")],
)
def test_a_generated_table_that_a_hand_has_edited_fails_the_check(folder: Path, old: str, new: str) -> None:
    prove_rung_4()
    page = pages()
    call("docs")
    text = page.read_text()
    assert old in text
    page.write_text(text.replace(old, new, 1))

    told = call("check", expected=1).stdout

    assert re.search(r"smollm2-135m\.md:\d+: the records do not say '.*" + re.escape(new), told)


def test_a_page_that_says_less_than_the_records_prove_passes(folder: Path) -> None:
    kept("inspect", [], {"report": {"errors": []}})
    pages("# Page\n\n<!-- generated: performance smollm2-135m -->\n<!-- end -->\n")
    bench(served=False)

    call("check")


def test_a_speed_stands_beside_the_conditions_it_was_measured_under() -> None:
    null = {"metric": "decode", "arm": "null", "role": "null", "primary": True, "ratio": 0.986, "verdict": None}
    judged = {"metric": "decode", "arm": "peer", "role": "candidate", "unit": "s/token", "verdict": "SLOWER"}
    document = {
        "model": {"name": "m", "sha256": "f" * 64},
        "scenario": "decode",
        "valid": True,
        "served": True,
        "starts": 2,
        "valid_blocks": 12,
        "schedule": [[0]] * 13,
        "workload": {"n_prompt": 128, "n_out": 256, "concurrency": 2, "sampling": "greedy"},
        "plan": {"isa": "avx2", "threads": 1, "activation_dtype": "int8", "kv_dtype": "float16", "device": "cpu"},
        "machine": {"hard": MACHINE},
        "started_utc": "2026-11-30T02:06:50Z",
        "code": {"commit": "179480d5c3" + "0" * 30},
        "device_class": "cpu",
        "arms": [
            {"name": "ours", "role": "baseline", "served_by": "pocketllm"},
            {"name": "peer"},
            {"name": "null", "role": "null"},
        ],
        "results": [{**judged, "ratio": 2.0, "low": 1.9, "high": 2.1}, null],
        "medians": {"decode": {"ours": 0.0025, "peer": 0.005, "null": 0.0025}, "prefill": {"ours": 0.001}},
    }
    text = regenerate(
        "m.md",
        "<!-- generated: performance m -->\n<!-- end -->\n",
        Source([], [Evidence("0" * 26, "bench", document, (), "bench/x.parquet")], {}),
    )

    for words in (
        "**decode, 128 in / 256 out** on `cpu`, 2 requests at a time, over HTTP, greedy",
        "(avx2, 1 thread, activations int8, cache float16, Z80, 1 core;",
        f"12 blocks, 2 starts, null arm -1.4%, 2026-11-30, commit 179480d5c3; [record][{'0' * 16}]):",
        "| decode | ours (pocketllm) | 400.0 tokens/s | 1 | baseline |",
        "| decode | peer | 200.0 tokens/s | 2.000× (1.900–2.100) | SLOWER |",
    ):
        assert words in text
    assert "prefill" not in text  # not judged: no figure of the model
    assert "| null" not in text


def test_a_page_tells_what_the_family_declares_and_the_file_holds(folder: Path) -> None:
    report = {
        "errors": [],
        "memory": {"context_length": 8192, "kv_bytes_per_token": {"float16": 23040}},
        "tokenizer": {"has_chat_template": False},
        "quant_types": [{"type": "Q4_1", "tensors": 210}],
    }
    kept("inspect", [], {"report": report})
    page = pages("<!-- generated: features smollm2-135m -->\n<!-- end -->\n")
    call("docs")

    text = page.read_text()
    for cell in ("yes, as family `llama`", "as many as the cache holds", "`rms_norm`, `rope`", "8,192 tokens"):
        assert f"{cell}" in text
    assert "refused with a sentence" in text
    shown = " ".join(call("show", "smollm2-135m").stdout.split())
    assert "22.5 KiB" in shown
    assert "activations, if none are asked for mixed" in shown
    assert "activation bits" not in shown
    assert json.loads(call("show", "smollm2-135m", "--json").stdout)["features"]["context"] == "8,192 tokens"


def test_a_declared_field_that_nobody_put_into_words_is_told_by_its_name() -> None:
    model = {"name": "m", "sha256": "f" * 64, "architecture": "llama"}
    inspection = Evidence("0" * 26, "inspect", {"model": model, "report": {"errors": []}}, ())
    declared = {"llama": {"max_num_seqs": 4, "supports_rest": True, "state": frozenset({"b", "a"}), "top": None}}

    text = regenerate("m.md", "<!-- generated: features m -->\n<!-- end -->\n", Source([], [inspection], {}, declared))

    for line in ("requests in one step | at most 4", "supports rest | yes", "state | a, b", "top | not said"):
        assert f"| {line} |" in text
    unknown = regenerate("m.md", "<!-- generated: features m -->\n<!-- end -->\n", Source([], [inspection], {}))
    assert "no: there is no family llama" in unknown


def test_a_file_that_was_only_timed_beside_other_engines_is_no_model_of_the_pages() -> None:
    timed, proven, known = (
        LadderRow(name, "llama", digit * 64, "cpu", rung, "current", (), "")
        for name, digit, rung in (("timed", "1", 0), ("own", "2", 1), ("m", "3", 0))
    )

    found = Source([timed, proven, known], [], {"m": "3" * 64}).whole_ladder()

    assert [row.model for row in found] == ["own", "m"]


def test_weights_that_the_catalog_no_longer_serves_are_superseded() -> None:
    row = LadderRow("m", "llama", "0" * 64, "cpu", 3, "current", (), "")
    [found, pinned] = Source([row], [], {"m": "f" * 64}).whole_ladder()

    assert (found.freshness, found.because) == ("superseded", "the catalog's m has other weights now")
    assert (pinned.rung, pinned.freshness) == (0, "unknown")


@pytest.mark.parametrize(
    ("name", "line", "exit_code"),
    [
        ("smollm2-135m.md", "It reached rung 1.", 0),
        ("smollm2-135m.md", "It reached Rung 2 on Monday.", 1),
        ("smollm2-135m.md", "| `smollm2-135m` | llama | cpu | 1 inspect only | | |", 0),
        ("smollm2-135m.md", "| `smollm2-135m` | llama | cpu | 2 experimental | | |", 1),
        ("smollm2-135m.md", "| smollm2-135m | llama | cuda | 1 inspect only | | |", 1),
        ("smollm2-135m.md", "| smollm2-135m | llama | cpu | 9 better than all | | |", 1),
        ("smollm2-135m.md", "| smollm2-135m | llama | cpu-reference | 1 inspect only | | |", 1),
        ("smollm2-135m.md", "| [smollm2-135m](x.md) | llama | cpu | 2 experimental |", 1),
        ("smollm2-135m.md", "| [smollm2-135m](x.md) | llama | cpu | 1 inspect only |", 0),
        ("smollm2-135m.md", "Good for text + server.", 1),
        ("smollm2-135m.md", "Good for text, CLI only.", 1),
        ("gemma3-270m.md", "rung 1", 1),
        ("README.md", "rung 1", 0),
        ("README.md", "| 4 text + server | a golden record through HTTP |", 0),
        ("README.md", "They are text + server.", 1),
        ("README.md", "rung 2", 1),
        ("README.md", "| gemma3-270m | gemma3 | cpu | 1 inspect only | | |", 1),
        ("README.md", "| unheard-of | llama | cpu | 1 inspect only | | |", 1),
    ],
)
def test_every_claim_in_a_page_is_held_to_the_records(folder: Path, name: str, line: str, exit_code: int) -> None:
    kept("inspect", [], {"report": {"errors": []}})
    pages(f"# Page\n\n{line}\n", name)

    result = call("check", expected=exit_code)

    assert (f"{name}:3: claims rung" in result.stdout) == bool(exit_code)


def test_records_of_other_weights_under_the_catalog_s_name_prove_nothing(folder: Path) -> None:
    other = {**MODEL, "name": "smollm2-135m", "sha256": "0" * 64}
    kept("inspect", [], {"report": {"errors": []}}, model=other)
    pages("rung 1\n")

    call("check", expected=1)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("<!-- generated: ladder * -->\n", "has no '<!-- end -->'"),
        ("<!-- end -->\n", "x.md:1: unexpected marker"),
        ("<!-- generated: ladder * -->\n<!-- generated: ladder * -->\n<!-- end -->\n", "x.md:2: unexpected marker"),
        ("<!-- generated: ladder -->\n<!-- end -->\n", "x.md:1: unexpected marker"),
        (
            "<!-- generated: poem * -->\n<!-- end -->\n",
            "no generated part 'poem'; known: matrix, ladder, features, performance, parity",
        ),
    ],
)
def test_markers_that_do_not_pair_are_refused_and_the_page_left_alone(folder: Path, text: str, complaint: str) -> None:
    page = pages(text, "x.md")

    assert complaint in call("docs", expected=2).stderr
    assert page.read_text() == text


def test_a_folder_without_pages_is_refused(folder: Path) -> None:
    assert "no pages in docs/models" in call("check", expected=2).stderr
    assert "no pages in elsewhere" in call("docs", "--docs", "elsewhere", expected=2).stderr


@given(rung=st.integers(0, 4), claimed=st.integers(0, 9))
def test_exactly_the_claims_above_the_proof_are_found(rung: int, claimed: int) -> None:
    row = LadderRow("m", "llama", "f" * 64, "cpu", rung, "unknown", (), "")
    source = Source([row], [], {})

    found = list(overclaims("m.md", f"rung {claimed}\n| m | llama | cpu | {claimed} x | | |\n", source))

    assert len(found) == (2 if claimed > rung else 0)
    written = regenerate("m.md", "<!-- generated: ladder m -->\n<!-- end -->\n", source)
    assert not [*overclaims("m.md", written, source), *discrepancies("m.md", written, source)]
    assert regenerate("m.md", written, source) == written


# -- the pages of this repository --------------------------------------------------------------------------------------
OWN_PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "models").glob("*.md"))]


def test_the_pages_of_this_repository_claim_no_more_than_its_records_prove(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)

    call("check")


@pytest.mark.parametrize("page", OWN_PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_to_a_file(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = {*re.findall(r"\]\(([^)#:]+)[^):]*\)", text), *re.findall(r"^\[\w+\]: (\S+)$", text, re.M)}

    assert targets
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_every_model_of_the_catalog_has_a_page_that_tells_how_to_run_it_and_what_it_supports() -> None:
    for name in catalog.CATALOG:
        text = (ROOT / "docs" / "models" / f"{name}.md").read_text(encoding="utf-8")
        for part in ("ladder", "features", "performance"):
            assert f"<!-- generated: {part} {name} -->" in text
        assert f"pocketllm models pull {name}" in text
        assert "\n## Limits\n" in text


def test_the_table_of_the_readme_can_be_read_as_text() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text.split("<!-- generated: matrix * -->")[1].split("<!-- end -->")[0]

    assert max(map(len, table.splitlines())) <= 100
    assert not re.search(r"[0-9A-HJKMNP-TV-Z]{20}", table)


def of_family(run_id: str, name: str, nmse: float, device: str = "cpu", **row: Any) -> Evidence:
    """A tiny checkpoint's parity record."""
    model = {"name": name, "sha256": name, "architecture": "qwen9", "quant_types": ["F32", name]}
    given = {"subject": "family:qwen9, one batch", "nmse": nmse, "tolerance": 3e-3, "passed": True, **row}
    return Evidence(run_id, "parity", {"device_class": device, "model": model}, [given], f"parity/{run_id}.parquet")


def parity_table(*evidence: Evidence) -> list[str]:
    page = regenerate("x.md", "<!-- generated: parity * -->\n<!-- end -->\n", Source([], evidence, {}))
    return [line for line in page.splitlines() if line.startswith(("| `", "["))]


def test_a_family_s_parity_is_told_by_the_latest_record_of_each_checkpoint() -> None:
    lines = parity_table(
        of_family("01A", "Q4_0", 9e-4),
        of_family("01C", "Q4_0", 2e-4),
        of_family("01B", "Q8_0", 3e-4),
        of_family("01D", "Q8_0", 1e-12, "cpu-reference", tolerance=1e-9),
        of_family("01E", "Q8_0", 1.0, subject="model:real"),
    )

    assert lines == [
        "| `qwen9` | cpu | F32, Q4_0, Q8_0 | 3.0e-04 | 3e-03 | 2, the latest [here][01C] |",
        "| `qwen9` | cpu-reference | F32, Q8_0 | 1.0e-12 | 1e-09 | [here][01D] |",
        "[01C]: ../../records/parity/01C.parquet",
        "[01D]: ../../records/parity/01D.parquet",
    ]


def test_a_comparison_outside_its_limit_is_not_told_as_kept() -> None:
    [line, _] = parity_table(of_family("01A", "Q4_0", 0.5, passed=False))

    assert line == "| `qwen9` | cpu | F32, Q4_0 | 5.0e-01 | not kept | [here][01A] |"


def test_a_page_without_generated_parts_is_left_as_it_is() -> None:
    text = "# Title\n\ntext\n"

    assert regenerate("x.md", text, Source([], [], {})) == text
    with pytest.raises(RecordError):
        regenerate("x.md", text + "<!-- end -->", Source([], [], {}))


# -- the cache ---------------------------------------------------------------------------------------------------------
def cached(folder: Path, name: str = "smollm2-135m") -> Path:
    """A sparse file of the right size where the catalog's model would lie."""
    path = catalog.cached_path(catalog.CATALOG[name])
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(catalog.CATALOG[name].num_bytes)
    return path


def test_the_cache_is_listed_with_what_is_not_fetched(folder: Path) -> None:
    assert call("ls").stdout == ""
    assert json.loads(call("ls", "--json").stdout) == []

    path = cached(folder)

    result = call("ls")
    assert "smollm2-135m  98.4 MB" in result.stdout
    assert "not fetched: gemma3-270m" in result.stderr
    assert json.loads(call("ls", "--json").stdout) == [{"name": "smollm2-135m", "bytes": 98_362_432, "path": str(path)}]


def test_a_model_in_the_cache_is_not_fetched_again(folder: Path) -> None:
    path = cached(folder)

    assert call("pull", "smollm2-135m").stdout.strip() == str(path)
    assert str(path) in json.loads(call("show", "smollm2-135m", "--json").stdout)["cached"]


def test_pulling_an_unknown_model_is_refused(folder: Path) -> None:
    assert "did you mean smollm2-135m" in call("pull", "smollm2", expected=2).stderr


def test_removing_wants_a_yes(folder: Path) -> None:
    path = cached(folder)

    assert "add --yes" in call("rm", "smollm2-135m", expected=2).stderr
    assert path.exists()

    assert "98.4 MB freed" in call("rm", "smollm2-135m", "--yes").stderr
    assert not path.exists()
    assert "not in the cache" in call("rm", "smollm2-135m", "--yes", expected=2).stderr
    assert "no model named" in call("rm", "../../etc", "--yes", expected=2).stderr


@pytest.mark.skipif(sys.platform == "win32", reason="no-pseudo-terminal")
@pytest.mark.parametrize(("answer", "left"), [(b"n\n", True), (b"y\n", False)])
def test_somebody_at_a_terminal_is_asked(folder: Path, answer: bytes, left: bool) -> None:
    import pty

    path = cached(folder)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", "from pocketllm.cli.main import app; app()", "models", "rm", "smollm2-135m"]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ}
    )
    os.write(ours, answer)
    _, told = process.communicate(timeout=60)
    os.close(ours)
    os.close(theirs)

    assert process.returncode == 0
    assert path.exists() == left
    assert b"98.4 MB) from the cache?" in told
