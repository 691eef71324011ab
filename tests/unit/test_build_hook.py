"""The build hook: which instruction sets the native library is compiled for."""

import importlib.util
import platform
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.native import needs_native, usable_isas

ROOT = Path(__file__).parents[2]
AVX2 = frozenset({"sse2", "avx2", "fma", "bmi2"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"}


class Hook:
    """In place of hatchling's, which builds have and tests need not."""

    def __class_getitem__(cls, _: Any) -> type["Hook"]:
        return cls

    root, app = str(ROOT), None


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module hatch_build."""
    name = "hatchling.builders.hooks.plugin.interface"
    for depth in range(1, name.count(".") + 2):
        monkeypatch.setitem(sys.modules, ".".join(name.split(".")[:depth]), ModuleType("hatchling"))
    monkeypatch.setattr(sys.modules[name], "BuildHookInterface", Hook, raising=False)
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (frozenset(), ()),
        (frozenset({"sse2"}), ("portable",)),
        (AVX2 - {"fma"}, ("portable",)),
        (AVX2, ("portable", "avx2")),
        (AVX2 | {"avx_vnni"}, ("portable", "avx2", "avxvnni")),
        (AVX512, ("portable", "avx2", "avx512")),
        (AVX512 | {"avx_vnni", "avx512_vnni"}, ("portable", "avx2", "avxvnni", "avx512", "avx512vnni")),
    ],
)
def test_a_processor_has_the_sets_whose_flags_it_has(hook: Any, flags: frozenset[str], expected: tuple[str]) -> None:
    assert hook.isas_of(flags) == expected


@needs_native
@pytest.mark.skipif(platform.system() != "Linux" or platform.machine() != "x86_64", reason="no-cpuinfo-flags")
def test_the_hook_and_the_library_agree_on_what_this_processor_can_run(hook: Any) -> None:
    named = set(hook.isas_of(hook.read_flags()))

    assert set(usable_isas()) <= named
    assert named - set(usable_isas()) <= {"avxvnni"}  # a compiler of some years ago has no name for it


@pytest.mark.parametrize(("version", "expected"), [("editable", "portable;avx2"), ("standard", "")])
def test_what_is_installed_in_place_is_built_for_this_processor_and_a_wheel_for_all(
    hook: Any, version: str, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(hook, "BACKEND", Path("backend"))
    monkeypatch.setattr(hook, "read_flags", lambda: AVX2)
    monkeypatch.setattr(hook, "compiler", lambda: "c++")
    monkeypatch.setattr(hook, "shutil", SimpleNamespace(which=lambda name: name))
    monkeypatch.setattr(hook, "run", lambda command, at: commands.append(command))
    monkeypatch.setenv("POCKETLLM_NATIVE", "auto")
    native = hook.NativeBuild()
    native.root = str(tmp_path)
    native.initialize(version, {})

    assert f"-DPOCKETLLM_ISAS={expected}" in commands[0]


@pytest.fixture
def without_compiler(hook: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The hook over a package that holds an old library, on a machine without a compiler; what it warns of."""
    (tmp_path / hook.BACKEND).mkdir(parents=True)
    (tmp_path / hook.BACKEND / hook.LIBRARY).write_text("old")
    monkeypatch.setattr(hook.shutil, "which", lambda name: None)
    native = hook.NativeBuild()
    native.root, native.warnings = str(tmp_path), []
    native.app = SimpleNamespace(display_warning=native.warnings.append)
    return native


@pytest.mark.parametrize("version", ["editable", "standard"])
def test_without_a_compiler_the_installation_goes_on_in_pure_python_and_keeps_the_reason(
    hook: Any, without_compiler: Any, version: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("POCKETLLM_NATIVE", "auto")
    build_data: dict[str, Any] = {}
    without_compiler.initialize(version, build_data)

    reason = "not built: no C++ compiler was found (c++, g++ or clang++, or CXX)"
    assert (tmp_path / hook.BACKEND / hook.NOTE).read_text() == f"{reason}\n"
    assert without_compiler.warnings == [f"the native CPU library was {reason}"]
    assert not (tmp_path / hook.BACKEND / hook.LIBRARY).exists()
    assert without_compiler.dependencies() == []
    assert build_data == {}


def test_a_library_that_is_required_and_cannot_be_built_ends_the_installation(
    without_compiler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POCKETLLM_NATIVE", "require")
    with pytest.raises(SystemExit, match=r"the native CPU library was not built: no C\+\+ compiler was found"):
        without_compiler.initialize("editable", {})
