"""The house rules that a reader should be able to rely on, checked on every commit."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "pocketllm"
SOURCES = sorted(PACKAGE.rglob("*.py"))
VENDORS = [path for path in (PACKAGE / "engine" / "backends").iterdir() if path.is_dir() and path.name != "api"]
REGISTRY_FOLDERS = {"families", "quant", "scenarios"}
BANNED_NAMES = {"utils", "util", "common", "base", "core", "helpers", "misc", "manager"}
MAX_FILE_LINES = 400
MAX_FOLDER_ENTRIES = 12


def device_symbols(source: str) -> list[str]:
    """Places where a source names a device: torch.cuda, torch.compile, x.cuda(), a "cuda…" literal."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr="cuda" | "compile" as attribute):
                found.append(f"{node.lineno}: torch.{attribute}")
            case ast.Call(func=ast.Attribute(attr="cuda")):
                found.append(f"{node.lineno}: .cuda()")
            case ast.Constant(value=str() as text) if text == "cuda" or text.startswith("cuda:"):
                found.append(f"{node.lineno}: {text!r}")
    return found


def outside_vendors() -> list[Path]:
    return [path for path in SOURCES if not any(vendor in path.parents for vendor in VENDORS)]


@pytest.mark.parametrize("path", outside_vendors(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_device_is_named_outside_a_vendor_folder(path: Path) -> None:
    assert device_symbols(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source", ["x.cuda()", "torch.zeros(1, device='cuda')", "torch.cuda.sync()", "torch.compile(f)"]
)
def test_the_check_itself_catches_a_device(source: str) -> None:
    assert device_symbols(source)


def test_the_layer_contracts_hold() -> None:
    answer = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert answer.returncode == 0, answer.stdout


def test_files_and_folders_stay_small_enough_to_hold_in_a_head() -> None:
    long_files = {
        str(path.relative_to(ROOT)): lines
        for path in SOURCES
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > MAX_FILE_LINES
    }
    crowded = {
        str(folder.relative_to(ROOT)): len(entries)
        for folder in [PACKAGE, *(path for path in PACKAGE.rglob("*") if path.is_dir())]
        if folder.name not in REGISTRY_FOLDERS | {"__pycache__"}
        and len(entries := [entry for entry in folder.iterdir() if not entry.name.startswith("_")]) > MAX_FOLDER_ENTRIES
    }

    assert (long_files, crowded) == ({}, {})


def test_no_room_is_called_nothing_in_particular() -> None:
    assert [path for path in PACKAGE.rglob("*") if path.stem in BANNED_NAMES] == []


def test_the_top_level_of_the_package_is_the_one_agreed_on() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and not path.name.startswith("_")}

    assert folders == {"cli", "bench", "golden", "evidence", "engine"}


NAMES_OF_TRITON = {"params", "specialization", "options", "backend", "specialize_impl"}
"""Variables of the function that Triton 3.6 makes of a kernel's signature: an argument of that name is lost there."""


def lost_arguments(source: str) -> list[str]:
    """Arguments of kernels whose value Triton would put something else in the place of."""
    return [
        f"{node.name}: {argument.arg}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(mark) for mark in node.decorator_list)
        for argument in node.args.args
        if argument.arg in NAMES_OF_TRITON
    ]


def test_no_kernel_calls_an_argument_as_triton_calls_a_variable_of_its_own() -> None:
    found = {path.name: lost for path in SOURCES if (lost := lost_arguments(path.read_text(encoding="utf-8")))}

    assert found == {}
    assert lost_arguments("@triton.jit\ndef kernel(x, params):\n    pass\n") == ["kernel: params"]
