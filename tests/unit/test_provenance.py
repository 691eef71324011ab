"""Provenance: facts or nothing, and nothing that names this machine or its user."""

import getpass
import json
import platform
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pocketllm
from pocketllm.evidence import provenance
from pocketllm.evidence.provenance import code, gpu, machine, readings, redaction
from pocketllm.evidence.schema import check_rows


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["/opt/x/bin/pocketllm", "bench"], ["pocketllm", "bench"]),
        (["p", "--api-key", "hunter2", "go"], ["p", "--api-key", "***", "go"]),
        (["p", "--api-key=hunter2"], ["p", "--api-key=***"]),
        (["p", "--header", "Authorization: Bearer abc"], ["p", "--header", "***"]),
        (["p", "-H", "X-Key: abc"], ["p", "-H", "***"]),
        (["p", "--hf-token", "abc"], ["p", "--hf-token", "***"]),
        (["p", "--max-tokens", "5", "--stop-token-ids", "1,2"], ["p", "--max-tokens", "5", "--stop-token-ids", "1,2"]),
        (["p", "--tokenizer", "x"], ["p", "--tokenizer", "x"]),
        (["p", "OPENAI_API_KEY=abc"], ["p", "OPENAI_API_KEY=***"]),
        (["p", "sk-abcdefghijklmnop1234"], ["p", "***"]),
        (["p", "--model", "/usr/share/m/model.gguf"], ["p", "--model", "model.gguf"]),
        (["p", "--model=~/models/model.gguf"], ["p", "--model=model.gguf"]),
        (["p", "--model", "models/model.gguf"], ["p", "--model", "models/model.gguf"]),
        (["p", "--arms", "new:path=/usr/local/wt,threads=2"], ["p", "--arms", "new:path=wt,threads=2"]),
        (
            ["p", "--arms", "peer:url=http://me:pw@127.0.0.1:8080/v1?key=1#x"],
            ["p", "--arms", "peer:url=http://127.0.0.1:8080/v1"],
        ),
        (
            ["p", "--arms", "peer:url=http://h/v1,api_key=abc"],
            ["p", "--arms", "peer:url=http://host-aaa94026/v1,api_key=***"],
        ),
        (["p", "url=http://127.0.0.1/v1?a=1,2secret"], ["p", "url=http://127.0.0.1/v1"]),
        (["p", "--host", "gpu7.example.org", "--port", "1"], ["p", "--host", "host-2ded11d9", "--port", "1"]),
        (["p", "--host=10.0.0.5"], ["p", "--host=host-0546412d"]),
        (["p", "--host", "0.0.0.0"], ["p", "--host", "0.0.0.0"]),
        (["p", "--host", "::1", "--rpc", "[::1]:5"], ["p", "--host", "::1", "--rpc", "[::1]:5"]),
        (["p", "--rpc", "10.0.0.5:50052,localhost:1"], ["p", "--rpc", "host-0546412d:50052,localhost:1"]),
        (["p", "/v1/chat/completions"], ["p", "/v1/chat/completions"]),
        (["p", "http://localhost:1/v1"], ["p", "http://localhost:1/v1"]),
        (["p", "http://[::1]:1/v1"], ["p", "http://[::1]:1/v1"]),
        (["p", "file:///usr/share/m/model.gguf"], ["p", "file:model.gguf"]),
        (["p", "<think></usr><tool_call></tool_call>"], ["p", "<think></usr><tool_call></tool_call>"]),
        (["p", "hf:owner/repo/file.gguf"], ["p", "hf:owner/repo/file.gguf"]),
        ([], []),
    ],
)
def test_a_command_line_is_told_without_secrets_paths_and_hosts(argv: list[str], told: list[str]) -> None:
    assert redaction.redact(argv) == told


@given(secret=st.text("abcdefghij0123456789", min_size=20, max_size=30), before=st.sampled_from(["", "x ", "a=b "]))
def test_no_form_of_a_credential_survives(secret: str, before: str) -> None:
    forms = [
        ["p", "--api-key", secret],
        ["p", f"--api-key={secret}"],
        ["p", f"{before}Authorization: Bearer {secret}"],
        ["p", f"{before}http://user:{secret}@host/v1?token={secret}#{secret}"],
        ["p", f"{before}OPENAI_API_KEY={secret}"],
        ["p", f"{before}sk-{secret}"],
    ]
    for argv in forms:
        assert secret not in json.dumps(redaction.redact(argv)), argv


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x:cmd=my-server --api-key abc --port 1", "x:cmd=my-server --api-key *** --port 1"),
        ("x:cmd=my-server --hf-token 'a b'", "x:cmd=my-server --hf-token ***"),
        ("Authorization: Basic dXNlcjpwdw==", "Authorization: ***"),
        ("AWS_SECRET_ACCESS_KEY=abc HF_TOKEN=abc", "AWS_SECRET_ACCESS_KEY=*** HF_TOKEN=***"),
        ('{"api_key": "abc"}', '{"api_key": ***}'),
        ("github_pat_11ABCDEFG0abcdefghijkl", "***"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abcdefgh", "***"),
        ("x:cmd=my-server --host 10.0.0.5 --port 1", "x:cmd=my-server --host host-0546412d --port 1"),
        ("cannot reach 10.0.0.5:8000: refused", "cannot reach host-0546412d:8000: refused"),
        ("127.0.0.1:8000, cublas 10.3.9.90, loader.py:42", None),
        ("~somebody/models/x.gguf", "x.gguf"),
        ("/Users/somebody/models/x.gguf", "x.gguf"),
        ("log:/home/somebody/x.log", "log:x.log"),
        ("C:\\Users\\somebody\\x.gguf", "x.gguf"),
        ("a\x1b[31mb\r::error::c\x9bd\te\nf é", "a [31mb ::error::c d\te\nf é"),
        ("max_tokens=5 pad_token=3, first-token 5 ms, --stop-token-ids 1", None),
    ],
)
def test_a_sentence_is_told_without_secrets_and_users(text: str, told: str | None) -> None:
    assert redaction.scrub_text(text) == (text if told is None else told)


def test_a_command_line_inside_a_document_is_told_without_its_credential() -> None:
    document = {"arms": [{"argv": ["my-server", "--api-key", "abc", "-m", "x.gguf"], "names": ["header", "secret"]}]}

    assert redaction.scrub(document) == {
        "arms": [{"argv": ["my-server", "--api-key", "***", "-m", "x.gguf"], "names": ["header", "secret"]}]
    }


@given(st.text("/~ab:=?@ #[],.1\x000", max_size=30).flatmap(lambda text: st.sampled_from([text, f"--host {text}"])))
def test_redacting_takes_any_text_and_is_settled_after_one_pass(text: str) -> None:
    once = redaction.scrub_text(text)

    assert redaction.scrub_text(once) == once


def test_a_document_loses_paths_and_credentials_but_keeps_its_shape() -> None:
    document = {"arms": [{"path": "/usr/share/wt", "api_key": "abc", "n": 3}], "ok": True, "none": None, "header": "v3"}

    assert redaction.scrub(document) == {
        "arms": [{"path": "wt", "api_key": "***", "n": 3}],
        "ok": True,
        "none": None,
        "header": "v3",
    }


def test_collected_facts_name_neither_host_nor_user_nor_folder() -> None:
    text = json.dumps(provenance.collect(["/usr/bin/pocketllm", "bench"]))

    names = {str(Path.home()), str(Path.cwd()), platform.node(), getpass.getuser()}
    assert not {name for name in names if len(name) > 4 and name in text}


def test_facts_say_tool_code_packages_and_machine() -> None:
    facts = provenance.collect(["p"])

    assert facts["tool"] == {"name": "pocketllm", "version": pocketllm.__version__}
    assert facts["code"]["packages"]["pyarrow"]
    assert facts["machine"]["hard"]["cores_usable"] >= 1
    assert facts["machine"]["hard"]["memory_gib"] >= 1
    assert None not in facts["machine"]["hard"].values()
    assert None not in facts["machine"]["volatile"].values()


def test_a_fact_that_cannot_be_read_is_absent() -> None:
    def refuse() -> Any:
        raise FileNotFoundError("/sys/nothing")

    found = machine.readable({"governor": refuse, "cpu": lambda: None, "cores": lambda: 2})

    assert found == {"cores": 2}


class RefusedError(Exception):
    """NVML's own error."""


def refuse(*_: Any) -> int:
    raise RefusedError("not supported")


FAKE_NVML = SimpleNamespace(
    NVMLError=RefusedError,
    NVML_CLOCK_SM=1,
    NVML_CLOCK_MEM=2,
    NVML_TEMPERATURE_GPU=0,
    nvmlDeviceGetClockInfo=lambda device, kind: {1: 1980, 2: 3201}[kind],
    nvmlDeviceGetTemperature=lambda device, sensor: 41,
    nvmlDeviceGetPowerUsage=refuse,
    nvmlDeviceGetCurrentClocksEventReasons=lambda device: 0x20,
    nvmlDeviceGetMemoryInfo=lambda device: SimpleNamespace(used=7, total=141 * 2**30),
)
"""The few calls of nvidia-ml-py that a reading makes; power is refused, as on a rented machine."""


def test_a_gpu_is_read_and_what_its_driver_refuses_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "library", lambda: FAKE_NVML)
    monkeypatch.setattr(gpu, "handle", lambda: "gpu 0")

    assert gpu.hard_facts() == {"gpu_memory_gib": 141}
    assert gpu.reading() == {
        "gpu_clk_sm": 1980.0,
        "gpu_clk_mem": 3201.0,
        "gpu_temp": 41.0,
        "throttle_mask": 0x20,
        "vram": 7,
    }


def test_without_a_gpu_its_facts_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "library", lambda: None)

    assert (gpu.hard_facts(), gpu.volatile_facts(), gpu.reading()) == ({}, {}, {})


def test_a_reading_has_only_columns_of_the_bench_record_and_says_when_the_cpu_got_hot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu, "library", lambda: None)
    counts = iter([3, 3, 5])
    meter = readings.Meter(lambda: next(counts))

    cool, hot = meter.read(), meter.read()

    assert (cool["throttle_mask"], hot["throttle_mask"]) == (0, readings.CPU_THERMAL)
    assert cool["rss"] > 0
    assert check_rows("bench", [hot])[0]["throttle_mask"] == readings.CPU_THERMAL


def test_a_machine_that_does_not_count_throttling_has_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "library", lambda: None)

    assert "throttle_mask" not in readings.Meter(lambda: None).read()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small git checkout whose pocketllm/evidence/provenance/code.py is taken for the running one."""
    if shutil.which("git") is None:
        pytest.skip("git-not-installed")
    package = tmp_path / "pocketllm"
    (package / "evidence" / "provenance").mkdir(parents=True)
    (package / "__init__.py").write_text("version = 1\n")
    (package / "evidence" / "provenance" / "code.py").write_text("")
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "README.md").write_text("records")
    identity = ("-c", "user.name=n", "-c", "user.email=e@x")
    for words in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True, capture_output=True)
    monkeypatch.setattr(code, "__file__", str(package / "evidence" / "provenance" / "code.py"))
    return tmp_path


def test_a_clean_checkout_is_named_by_its_commit(checkout: Path) -> None:
    facts = code.code_facts()

    assert len(facts["commit"]) == 40
    assert facts["dirty"] is False
    assert "diff_sha256" not in facts


def test_records_prose_and_tests_do_not_make_a_tree_dirty(checkout: Path) -> None:
    for name in ("records/README.md", "records/new.parquet", "notes.md", "docs/page.html", "tests/test_more.py"):
        (checkout / name).parent.mkdir(exist_ok=True)
        (checkout / name).write_text("changed")

    assert code.code_facts()["dirty"] is False


@pytest.mark.parametrize(
    "name", ["pyproject.toml", "pocketllm/kernel.cpp", "constraints.txt", "pocketllm/docs.py", "tests/parity/record.py"]
)
def test_what_can_change_an_answer_makes_a_tree_dirty(checkout: Path, name: str) -> None:
    (checkout / name).parent.mkdir(parents=True, exist_ok=True)
    (checkout / name).write_text("changed")

    assert code.code_facts()["dirty"] is True


def test_a_changed_tree_has_a_digest_of_its_difference(checkout: Path) -> None:
    (checkout / "pocketllm" / "__init__.py").write_text("version = 2\n")
    changed = code.code_facts()
    (checkout / "pocketllm" / "extra.py").write_text("x = 1\n")
    extended = code.code_facts()
    (checkout / "pocketllm" / "extra.py").write_text("x = 2\n")
    edited = code.code_facts()

    assert changed["dirty"] is True
    assert len({changed["diff_sha256"], extended["diff_sha256"], edited["diff_sha256"]}) == 3


def test_code_outside_a_checkout_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pocketllm" / "evidence").mkdir(parents=True)
    monkeypatch.setattr(code, "__file__", str(tmp_path / "pocketllm" / "evidence" / "provenance" / "code.py"))

    assert code.code_facts() == {}


def test_a_package_that_a_checkout_ignores_is_not_that_checkout_s_code(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = checkout / ".venv" / "pocketllm" / "evidence"
    installed.mkdir(parents=True)
    (installed.parent / "__init__.py").write_text("")
    monkeypatch.setattr(code, "__file__", str(installed / "provenance.py"))

    assert code.code_facts() == {}
