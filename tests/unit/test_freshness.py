"""Freshness: stale by the first commit that changed what a claim rests on, and by nothing else."""

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pocketllm.evidence.ladder.freshness import freshened, is_of_another_isa, judged
from pocketllm.evidence.ladder.history import History
from pocketllm.evidence.ladder.meaning import meaning
from pocketllm.evidence.ladder.rows import LadderRow, Proof

ENGINE = "pocketllm/engine/"
FAMILY = f"{ENGINE}models/families/gpt_oss.py"
BLOCKS = f"{ENGINE}models/blocks.py"
FILES = {
    "pocketllm/__init__.py": "VERSION = '1'\n",
    "pocketllm/cli/generate.py": "x = 1\n",
    "pocketllm/bench/run.py": "x = 1\n",
    FAMILY: '"""A family."""\n\nfrom pocketllm.engine.models.blocks import used\n\nx = used()\n',
    BLOCKS: "def used():\n    return below()\n\n\ndef below():\n    return 1\n\n\ndef unused():\n    return 1\n",
    f"{ENGINE}models/families/llama.py": "x = 1\n",
    f"{ENGINE}models/contract.py": "x = 1\n",
    f"{ENGINE}backends/cpu/native/product.cpp": "int f() { return 1; } // one\n",
    f"{ENGINE}backends/cpu/native/simd/avx512.h": "int f() { return 1; }\n",
    f"{ENGINE}backends/cpu/native/simd/neon.h": "int f() { return 1; }\n",
    f"{ENGINE}backends/cuda/ops.py": "x = 1\n",
    f"{ENGINE}weights/gguf.py": "x = 1\n",
    f"{ENGINE}weights/catalog.py": "x = 1\n",
    f"{ENGINE}weights/inspection.py": "x = 1\n",
    f"{ENGINE}weights/quant/q4_1.py": "x = 1\n",
    f"{ENGINE}weights/quant/q6_k.py": "x = 1\n",
    f"{ENGINE}lifecycle/loop.py": "x = 1\n",
    f"{ENGINE}lifecycle/step_delay.py": "x = 1\n",
    f"{ENGINE}text/tokenizer.py": "x = 1\n",
    f"{ENGINE}serving/app.py": "x = 1\n",
    "records/README.md": "records\n",
}


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=n", "-c", "user.email=e@x")
    done = subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit(folder: Path, message: str = "x") -> str:
    git(folder, "add", ".")
    git(folder, "commit", "-qm", message, "--allow-empty")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


def proof(checkout: Path, kind: str = "golden", served: bool = False, **code: Any) -> Proof:
    facts = code or {"commit": git(checkout, "rev-parse", "HEAD"), "dirty": False}
    return Proof(1, kind, "0", "", kind, facts, "cpu", "avx512vnni", ("F32", "Q4_1"), {}, served)


def fresh(checkout: Path, proved: Proof) -> tuple[str, str]:
    found = judged(proved, "gpt-oss", History(checkout / "records"))
    return found.freshness, found.because


def edit(checkout: Path, name: str, old: str = "1", new: str = "2") -> None:
    text = (checkout / name).read_text()
    assert old in text
    (checkout / name).write_text(text.replace(old, new))


# -- what a claim rests on ---------------------------------------------------------------------------------------------
KINDS: dict[str, Callable[[Path], Proof]] = {
    "inspect": lambda checkout: proof(checkout, "inspect"),
    "parity": lambda checkout: proof(checkout, "parity"),
    "generate": proof,
    "http": lambda checkout: proof(checkout, served=True),
    "bench": lambda checkout: proof(checkout, "bench"),
}
RUNS = {"parity", "generate", "http", "bench"}
"""Kinds that compute."""
GOES = RUNS - {"parity"}
"""Kinds that go through the lifecycle."""


@pytest.mark.parametrize(
    ("name", "stale"),
    [
        ("pocketllm/__init__.py", set()),
        ("pocketllm/bench/run.py", set()),
        ("pocketllm/cli/generate.py", {"generate"}),
        (FAMILY, RUNS),
        (f"{ENGINE}models/families/llama.py", set()),
        (f"{ENGINE}models/contract.py", set()),
        (f"{ENGINE}backends/cpu/native/product.cpp", RUNS),
        (f"{ENGINE}backends/cpu/native/simd/avx512.h", RUNS),
        (f"{ENGINE}backends/cpu/native/simd/neon.h", set()),
        (f"{ENGINE}backends/cuda/ops.py", set()),
        (f"{ENGINE}weights/gguf.py", {"inspect", *RUNS}),
        (f"{ENGINE}weights/inspection.py", {"inspect"}),
        (f"{ENGINE}weights/catalog.py", set()),
        (f"{ENGINE}weights/quant/q4_1.py", RUNS),
        (f"{ENGINE}weights/quant/q6_k.py", set()),
        (f"{ENGINE}lifecycle/loop.py", GOES),
        (f"{ENGINE}lifecycle/step_delay.py", set()),
        (f"{ENGINE}text/tokenizer.py", GOES),
        (f"{ENGINE}serving/app.py", {"http"}),
    ],
)
def test_a_proof_is_stale_where_what_it_rests_on_has_changed(checkout: Path, name: str, stale: set[str]) -> None:
    proofs = {kind: made(checkout) for kind, made in KINDS.items()}
    (checkout / name).write_text((checkout / name).read_text() + "\nint_or_name = 3;\n")

    assert {kind for kind, proved in proofs.items() if fresh(checkout, proved)[0] == "stale"} == stale
    assert {fresh(checkout, proved)[0] for kind, proved in proofs.items() if kind not in stale} <= {"recent"}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("def below():\n    return 1", "def below():\n    return 2", "stale"),  # used by what is used
        ("def unused():\n    return 1", "def unused():\n    return 2", "recent"),
        ("def used():\n", "def used():\n    # why\n", "recent"),
        ("def used():\n", 'def used():\n    """Promise."""\n', "recent"),
        ("def used():\n", "print(1)\n\n\ndef used():\n", "stale"),  # runs whoever imports it
    ],
)
def test_of_a_shared_file_only_what_the_family_uses_counts(checkout: Path, old: str, new: str, expected: str) -> None:
    proved = proof(checkout)
    edit(checkout, BLOCKS, old, new)
    commit(checkout)

    assert fresh(checkout, proved)[0] == expected


def test_a_comment_a_docstring_a_new_file_and_a_change_taken_back_make_nothing_stale(checkout: Path) -> None:
    proved = proof(checkout)
    edit(checkout, f"{ENGINE}backends/cpu/native/product.cpp", "// one", "/* more\n than one */")
    edit(checkout, FAMILY, "A family.", "The family.")
    (checkout / ENGINE / "backends/cpu/native/added.cpp").write_text("int g() { return 1; }\n")
    edit(checkout, f"{ENGINE}lifecycle/loop.py", "1", "2")
    commit(checkout)
    edit(checkout, f"{ENGINE}lifecycle/loop.py", "2", "1")
    commit(checkout)

    assert fresh(checkout, proved)[0] == "recent"


def test_a_file_that_is_gone_makes_stale(checkout: Path) -> None:
    proved = proof(checkout)
    (checkout / ENGINE / "lifecycle/loop.py").unlink()

    assert fresh(checkout, proved)[0] == "stale"


@pytest.mark.parametrize(
    ("isa", "others"),
    [("avx512vnni", {"avx2", "neon", "portable"}), ("avxvnni", {"avx512", "neon", "portable"}), (None, set())],
)
def test_an_instruction_set_has_one_header_of_its_own(isa: str | None, others: set[str]) -> None:
    stems = {"avx2", "avx512", "neon", "portable", "simd"}

    assert {stem for stem in stems if is_of_another_isa(f"x/native/simd/{stem}.h", isa)} == others
    assert not is_of_another_isa("x/native/matmul/neon.h", isa)


def test_a_proof_that_names_no_backend_rests_on_all_of_them(checkout: Path) -> None:
    proved = replace(proof(checkout), backend=None)
    edit(checkout, f"{ENGINE}backends/cuda/ops.py")

    assert fresh(checkout, proved)[0] == "stale"


# -- which commit ------------------------------------------------------------------------------------------------------
def test_the_first_commit_that_changed_something_is_named_and_the_later_ones_counted(checkout: Path) -> None:
    proved = proof(checkout)
    loop, product = f"{ENGINE}lifecycle/loop.py", f"{ENGINE}backends/cpu/native/product.cpp"
    edit(checkout, product, "// one", "// two")
    commit(checkout, "Reword")
    edit(checkout, product)
    first = commit(checkout, "Round the other way")
    edit(checkout, loop)
    commit(checkout, "Loop")

    assert fresh(checkout, proved) == (
        "stale",
        f"kernels and lifecycle changed since: first in {first[:10]} (Round the other way), 1 more after it",
    )


def test_uncommitted_changes_are_called_that(checkout: Path) -> None:
    proved = proof(checkout)
    edit(checkout, f"{ENGINE}lifecycle/loop.py")

    assert fresh(checkout, proved)[1] == f"lifecycle changed since: uncommitted changes in {ENGINE}lifecycle/loop.py"


def test_right_after_a_release_nothing_is_stale(checkout: Path) -> None:
    proved = proof(checkout)
    (checkout / "records/new.parquet").write_text("x")
    commit(checkout, "Keep records")
    assert fresh(checkout, proved) == ("current", "")

    edit(checkout, "pocketllm/__init__.py")
    (checkout / "CHANGELOG.md").write_text("2\n")
    commit(checkout, "Release 2")
    git(checkout, "tag", "v2")
    assert fresh(checkout, proved) == ("recent", "1 file that it does not rest on changed")


# -- where git cannot tell ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("code", "why"),
    [
        ({"dirty": False}, "names no commit"),
        ({"commit": "0" * 40, "dirty": False}, "commit 0000000000 is not in this checkout"),
        ({"commit": "--all", "dirty": False}, "commit --all is not in this checkout"),
        ({"commit": "0" * 40, "dirty": True}, "made from uncommitted changes"),
        ({"commit": "0" * 40}, "made from uncommitted changes"),
    ],
)
def test_freshness_is_unknown_where_git_cannot_tell(checkout: Path, code: dict[str, Any], why: str) -> None:
    assert fresh(checkout, replace(proof(checkout), code=code)) == ("unknown", why)


def test_freshness_is_unknown_outside_a_checkout(tmp_path: Path) -> None:
    proved = Proof(1, "", "0", "", "golden", {"commit": "0" * 40, "dirty": False}, "cpu", None, (), {})

    assert judged(proved, "llama", History(tmp_path)).freshness == "unknown"


def test_a_golden_proof_is_stale_without_the_answers_that_it_compared(checkout: Path) -> None:
    folder = checkout / "records" / "fixtures" / "tiny"
    folder.mkdir(parents=True)
    for case in ("one", "two"):
        (folder / f"{case}.json").write_text(json.dumps({"case": case, "paths": ["generate"]}))
        key = {"backend": "cpu", "numerics_version": "cpu-2"}
        (folder / f"{case}.cpu.json").write_text(json.dumps({"case": case, "hard_key": key}))
    commit(checkout)
    proved = replace(proof(checkout), numerics="cpu-2")
    row = LadderRow("tiny", "gpt-oss", "0" * 64, "cpu", 3, "unknown", (proved,), "")

    assert freshened([row], checkout / "records")[0].freshness == "current"
    key = {"backend": "cpu", "numerics_version": "cpu-1"}
    (folder / "two.cpu.json").write_text(json.dumps({"case": "two", "hard_key": key}))
    [found] = freshened([row], checkout / "records")
    assert (found.freshness, found.because) == ("stale", "no answer by cpu-2 is kept for case two")
    for other in (replace(proved, kind="bench"), replace(proved, numerics="")):
        assert freshened([replace(row, proofs=(other,))], checkout / "records")[0].freshness == "current"


def test_a_row_is_as_fresh_as_its_worst_proof_and_says_why(checkout: Path) -> None:
    old = proof(checkout)
    edit(checkout, f"{ENGINE}serving/app.py")
    commit(checkout, "Serve")
    row = LadderRow("m", "gpt-oss", "0" * 64, "cpu", 4, "", (old, replace(old, served=True)), "")

    [found] = freshened([row], checkout / "records")

    assert [proved.freshness for proved in found.proofs] == ["recent", "stale"]
    assert found.freshness == "stale"
    assert found.because.startswith("server changed since: first in ")
    [bare] = freshened([replace(row, proofs=())], checkout / "records")
    assert bare.freshness == "unknown"


# -- meaning -----------------------------------------------------------------------------------------------------------
@given(
    code=st.sampled_from(["x = 1\n", "def f():\n    return 2\n", "class A:\n    x = 1\n"]), comment=st.text("ab #'\"")
)
def test_a_comment_never_changes_what_python_means(code: str, comment: str) -> None:
    assert meaning("a.py", f"# {comment}\n{code}".encode()) == meaning("a.py", code.encode())


@given(comment=st.text("ab \"'/", max_size=8))
def test_a_comment_never_changes_what_c_means(comment: str) -> None:
    code = 'int a;\n#define B "//"\nint c = 1;\n'

    assert meaning("a.h", code.replace("1;", f"1; // {comment}").encode()) == meaning("a.h", code.encode())


@pytest.mark.parametrize(
    ("path", "before", "after"),
    [
        ("a.py", "x = 1\n", "x = 2\n"),
        ("a.py", "x = (1\n", "x = (2\n"),  # no Python: its own bytes
        ("a.cpp", 'char* a = "//x";', 'char* a = "//y";'),
        ("a.cpp", "#define A 1\nint b;\n", "#define A 1 int b;\n"),
        ("a.toml", "# a\n", "# b\n"),
    ],
)
def test_what_does_something_else_means_something_else(path: str, before: str, after: str) -> None:
    assert meaning(path, before.encode()) != meaning(path, after.encode())
