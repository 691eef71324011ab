"""`pocketllm check` says what would run, or every reason why not."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pocketllm.cli.main import app
from pocketllm.engine.backends.cpu import library
from pocketllm.engine.backends.reference import device as reference
from tests.native import MISSING, forget_library, needs_native, without_native
from tests.parity.tiny_families import TinyFamily, write_family
from tests.tiny import TinyLlama, write_llama


def check(*words: str) -> Result:
    return CliRunner().invoke(app, ["check", *words])


def test_the_machine_and_its_backends_are_shown() -> None:
    result = check()

    assert result.exit_code == 0
    assert "cores usable" in result.stdout
    assert "reference  float32 on" in result.stdout


@needs_native
def test_the_native_backend_shows_its_instruction_set_and_its_dtypes() -> None:
    report = json.loads(check("--json").stdout)
    [cpu] = [backend for backend in report["backends"] if backend["name"] == "cpu"]

    assert cpu["runs"]
    assert cpu["reason"].startswith(cpu["isa"])
    assert cpu["kv_dtype"] == "float16"


@needs_native
def test_what_the_model_decides_is_told_of_no_backend_before_there_is_a_model(tiny_gguf: Path) -> None:
    def told(*words: str) -> list[tuple[str | None, str | None]]:
        backends = json.loads(check(*words, "--json").stdout)["backends"]
        running = {one["name"]: (one["activation_dtype"], one["numerics_version"]) for one in backends if one["runs"]}
        return [running[name] for name in ("cpu", "reference") if name in running]

    [(open_dtype, open_numerics), reference_alone] = told()
    [(_, said_numerics)] = told("--activation-dtype", "int16")
    [(dtype, numerics), _] = told("--model", str(tiny_gguf))

    assert (open_dtype, open_numerics) == (None, None)
    assert reference_alone == ("float32", "reference-1")
    assert str(said_numerics).endswith("-int16-float16")
    assert (dtype, str(numerics).endswith(f"-{dtype}-float16")) == ("mixed", True)


@needs_native
def test_dtypes_that_only_one_backend_has_choose_it(tiny_gguf: Path) -> None:
    model = ("--model", str(tiny_gguf))

    assert re.search(r"would run on\s+cpu on ", check(*model, "--kv-dtype", "int8").stdout)
    assert (
        "activations float32, cache bfloat16"
        in check(*model, "--activation-dtype", "float32", "--kv-dtype", "bfloat16").stdout
    )
    assert "backend reference has float32 only" not in check(*model, "--backend", "cpu").stdout


@needs_native
def test_activations_are_those_that_the_family_needs_unless_they_are_said(tiny_gguf: Path, tmp_path: Path) -> None:
    routed = str(write_family(tmp_path / "routed.gguf", TinyFamily("qwen3moe")))

    def said(model: str, *words: str) -> str:
        return check("--backend", "cpu", "--model", model, *words).stdout

    assert "activations mixed, cache float16" in said(str(tiny_gguf))
    assert "activations int16, cache float16" in said(routed)
    assert "activations int8, cache float16" in said(routed, "--activation-dtype", "int8")
    assert "family qwen3moe needs activations of 16 bits" in said(routed, "--activation-dtype", "int8")
    plan = json.loads(said(routed, "--json"))["model"]["plan"]
    assert (plan["activation_dtype"], plan["numerics_version"].split("-", 3)[3]) == ("int16", "int16-float16")


def test_without_the_native_library_the_reference_runs_and_the_reason_is_shown(
    monkeypatch: pytest.MonkeyPatch, tiny_gguf: Path
) -> None:
    with without_native(monkeypatch):
        result = check("--model", str(tiny_gguf))
        insisted = check("--backend", "cpu")

    assert result.exit_code == 0
    assert " *reference" in result.stdout
    assert "cpu  cannot run: its native library was not built" in result.stdout
    assert "backend auto chose reference (" in result.stdout
    assert f"cpu: {MISSING})" in result.stdout
    assert insisted.exit_code == 2
    assert "cpu, which was asked for, would not run" in insisted.stdout


def test_a_backend_that_was_asked_for_and_cannot_run_is_named_where_others_can() -> None:
    text = check("--backend", "reference", "--kv-dtype", "int8")
    alone = text.stdout.splitlines()[-1]

    assert text.exit_code == 2
    others = any(
        " cpu  avx" in line or " cpu  neon" in line or " cpu  portable" in line for line in text.stdout.split("\n")
    )
    wanted = "reference, which was asked for, would not run" if others else "none of these would run"
    assert alone.strip() == wanted


def test_more_threads_than_cores_are_noted(tiny_gguf: Path) -> None:
    model = ("--model", str(tiny_gguf), "--backend", "reference")

    assert "999 threads on the " in check(*model, "--threads", "999").stdout
    assert "fewer are faster" not in check(*model, "--threads", "1").stdout


def test_a_backend_that_nobody_has_is_refused_where_it_was_said(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = check("--backend", "zzz").stderr
    monkeypatch.setenv("POCKETLLM_BACKEND", "zzz")
    loaded = CliRunner().invoke(app, ["generate", "x", "--model", str(tiny_gguf)]).stderr

    assert "--backend 'zzz': no backend has this name" in flag
    assert "backend='zzz' (environment POCKETLLM_BACKEND): no backend has this name" in check().stderr
    assert "(environment POCKETLLM_BACKEND): no backend has this name" in loaded


def test_a_library_that_is_named_and_is_not_there_is_an_error_and_nothing_takes_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(library.PATH_VARIABLE, "/nope")
    forget_library()
    result = check()
    monkeypatch.undo()
    forget_library()

    assert result.exit_code == 2
    assert result.stderr == (
        "error: POCKETLLM_CPU_LIBRARY: there is no file /nope; name a library that was built, or unset it\n"
    )


def test_a_model_that_runs_has_a_plan(tiny_gguf: Path) -> None:
    result = check("--model", str(tiny_gguf), "--json")
    report = json.loads(result.stdout)

    assert result.exit_code == 0
    assert report["runs"] is True
    assert report["backend"] == report["model"]["plan"]["backend"]
    assert report["model"]["architecture"] == "llama"
    assert report["model"]["reasons"] == []
    assert report["model"]["plan"]["max_model_len"] == 512
    assert report["machine"]["num_cores"] >= 1


def test_a_model_that_does_not_run_has_every_reason_and_exit_code_2(tmp_path: Path) -> None:
    metadata = {"llama.expert_count": 8, "llama.rope.scaling.type": "longrope"}
    path = write_llama(tmp_path / "moe.gguf", TinyLlama(metadata=metadata))
    result = check("--model", str(path))

    assert result.exit_code == 2
    assert "would not run" in result.stdout
    assert "llama.expert_count=8 is not supported" in result.stdout
    assert "rope scaling 'longrope'" in result.stdout


def test_options_are_part_of_the_question(tiny_gguf: Path) -> None:
    result = check("--model", str(tiny_gguf), "--max-model-len", "513", "--json")

    assert result.exit_code == 2
    assert "max_model_len=513 is longer" in json.loads(result.stdout)["model"]["reasons"][0]


@pytest.mark.parametrize("words", [["--backend", "tpu"], ["--model", "no-such-model"], ["--max-num-seqs", "0"]])
def test_a_bad_word_is_one_sentence_and_exit_code_2(words: list[str]) -> None:
    result = check(*words)

    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_a_broken_checkpoint_is_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    result = check("--model", str(tmp_path / "broken.gguf"))

    assert result.exit_code == 2
    assert "broken.gguf" in result.stderr
    assert "Traceback" not in result.stderr


def test_without_torch_it_says_so_beside_what_the_checkpoint_lacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(reference, "find_spec", lambda name: None)
    path = write_llama(tmp_path / "moe.gguf", TinyLlama(metadata={"llama.expert_count": 8}))
    with without_native(monkeypatch):
        alone, with_model = check(), check("--model", str(path), "--json")
    report = json.loads(with_model.stdout)

    assert (alone.exit_code, with_model.exit_code) == (2, 2)
    assert "reference  cannot run: torch is not installed" in alone.stdout
    assert report["backend"] is None
    assert report["model"]["reasons"][0] == "llama.expert_count=8 is not supported by family llama"
    assert sorted(report["model"]["reasons"][1:]) == [
        f"backend cpu: {MISSING}",
        "backend cuda: no NVIDIA GPU",
        "backend reference: torch is not installed: pip install torch",
    ]


def test_checking_a_model_imports_no_torch(tiny_gguf: Path) -> None:
    code = (
        "import sys; from pocketllm.cli.check import report_on; from pocketllm.engine.options import EngineOptions; "
        f"report = report_on(EngineOptions(model={str(tiny_gguf)!r}), True); "
        "print(report['runs'], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["True", "False"]
