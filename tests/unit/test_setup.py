"""What `make demo` says and does before it installs anything."""

import json
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SETUP = Path(__file__).parents[2] / ".ci" / "setup.py"


@pytest.fixture(name="setup")
def the_script() -> ModuleType:
    spec = spec_from_file_location("setup_script", SETUP)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def item(name: str) -> dict[str, Any]:
    return {"metadata": {"name": name}, "download_info": {"url": "file:///x"}}


def pip_that_reports(setup: ModuleType, monkeypatch: pytest.MonkeyPatch, *names: str) -> list[dict[str, Any]]:
    """Let pip's place be taken by a program that prints a report; the list gets how it was started."""
    started: list[dict[str, Any]] = []
    report, begin = json.dumps({"install": [item(name) for name in names]}), subprocess.Popen

    def popen(command: list[Any], **words: Any) -> "subprocess.Popen[str]":
        started.append({"command": list(map(str, command)), **words})
        return begin([sys.executable, "-c", f"import time; time.sleep(0.3); print({report!r})"], **words)

    monkeypatch.setattr(setup.subprocess, "Popen", popen)
    monkeypatch.setattr(setup.shutil, "which", lambda name: None)
    return started


def test_asking_pip_what_is_needed_compiles_nothing_and_tells_that_it_goes_on(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = pip_that_reports(setup, monkeypatch, "rich")
    monkeypatch.setattr(setup, "PROGRESS_S", 0.1)
    setup.announce(Path(sys.executable), ["-e."])

    assert [one["env"]["POCKETLLM_NATIVE"] for one in started] == ["off"]
    said = capsys.readouterr().out
    assert "setup: asking which packages are needed, 0 s so far" in said
    assert "1 packages to install" in said


def test_the_native_library_is_built_last_and_that_is_said_first(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    started = pip_that_reports(setup, monkeypatch)
    setup.install(Path(sys.executable), "", "")
    assert "building" not in capfd.readouterr().out
    setup.build_native(Path(sys.executable))

    assert [(one.get("env") or {}).get("POCKETLLM_NATIVE") for one in started if "pip" in one["command"]] == [
        "off",
        "off",
        None,
    ]
    assert capfd.readouterr().out.startswith("setup: building the native CPU library")


@pytest.mark.parametrize(
    ("name", "warns"), [("nvidia-ml-py", False), ("nvidia-cublas-cu12", True), ("cuda-bindings", True)]
)
def test_only_cuda_libraries_are_called_cuda_libraries(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, warns: bool
) -> None:
    pip_that_reports(setup, monkeypatch, "torch", name)
    monkeypatch.setattr(setup.Path, "exists", lambda path: False)
    setup.announce(Path(sys.executable), [])

    assert ("carries CUDA libraries" in capsys.readouterr().out) is warns
