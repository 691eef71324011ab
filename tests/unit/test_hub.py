"""The hub: names of its files, its cache, and every way it says no or nothing, in one sentence. No network."""

import os
import socket
import subprocess
import sys
import types
from pathlib import Path

import pytest

from pocketllm.engine.weights.catalog import resolve_model
from pocketllm.engine.weights.fetching import hub
from pocketllm.errors import ModelNotFoundError


def test_a_hub_name_has_an_owner_a_repository_a_file_and_perhaps_a_revision() -> None:
    assert hub.parse("hf:o/r/f.gguf") == ("o/r", "f.gguf", None)
    assert hub.parse("hf:o/r/sub/f.gguf@main") == ("o/r", "sub/f.gguf", "main")


@pytest.mark.parametrize("name", ["hf:", "hf:o/r", "hf:o//f", "hf:o/../f", "hf:o/r/../../f.gguf", "hf:o/r/a\\b.gguf"])
def test_a_hub_name_that_is_none_is_refused_before_the_library_is_asked(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelNotFoundError, match=r"is not hf:owner/repo/file.gguf"):
        resolve_model(name)


def test_a_missing_hub_library_names_the_extra() -> None:
    # in its own process: the import must really fail
    code = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'huggingface_hub':\n"
        "            raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "from pocketllm.engine.weights.catalog import resolve_model\n"
        "from pocketllm.errors import OptionError\n"
        "try:\n"
        "    resolve_model('hf:o/r/f.gguf')\n"
        "except OptionError as error:\n"
        "    print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert result.stdout == "hf:o/r/f.gguf needs the hub extra: pip install 'pocketllm[hub]'\n"


def test_all_shards_of_a_split_hub_file_are_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = pytest.importorskip("huggingface_hub", reason="missing-extra: hub")
    asked: list[tuple[str, str, str | None]] = []

    def download(repository: str, file_name: str, revision: str | None = None) -> str:
        asked.append((repository, file_name, revision))
        return str(tmp_path / file_name)

    monkeypatch.setattr(library, "hf_hub_download", download)
    monkeypatch.setattr(library, "get_hf_file_metadata", lambda url, timeout: None)
    path = resolve_model("hf:o/r/q4/m-00002-of-00002.gguf@v1")

    assert path == tmp_path / "q4/m-00001-of-00002.gguf"
    assert asked == [("o/r", f"q4/m-0000{i}-of-00002.gguf", "v1") for i in (1, 2)]


@pytest.mark.parametrize(("size", "told"), [(2_500_000, "2 MB"), (None, "of a size that it does not tell")])
def test_what_is_fetched_from_the_hub_is_told_with_its_size_and_what_is_cached_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size: int | None, told: str
) -> None:
    library = pytest.importorskip("huggingface_hub", reason="missing-extra: hub")
    found = {"a.gguf": str(tmp_path / "a.gguf"), "b.gguf": None}
    monkeypatch.setattr(library, "try_to_load_from_cache", lambda _, file, **__: found[file])
    monkeypatch.setattr(library, "get_hf_file_metadata", lambda url, timeout: types.SimpleNamespace(size=size))
    monkeypatch.setattr(library, "hf_hub_download", lambda _, file, **__: str(tmp_path / file))
    lines: list[str] = []
    for file in found:
        resolve_model(f"hf:o/r/{file}", lines.append)

    assert lines == [f"fetching b.gguf of o/r from the hub: {told}, to {library.constants.HF_HUB_CACHE}"]


def test_an_unreachable_hub_is_one_sentence_at_once(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub", reason="missing-extra: hub")
    code = (
        "import time\n"
        "from pocketllm.engine.weights.catalog import resolve_model\n"
        "from pocketllm.errors import ModelNotFoundError\n"
        "time.sleep = lambda seconds: print('waits to ask again')\n"
        "try:\n"
        "    resolve_model('hf:o/r/f.gguf')\n"
        "except ModelNotFoundError as error:\n"
        "    print(error)\n"
    )
    said = "hf:o/r/f.gguf: the hub cannot be reached and the file is not in its local cache"
    away = {"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:1"}
    for told in away:
        environment = {**os.environ, **told, "HF_HOME": str(tmp_path)}
        result = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
        )

        assert result.stdout == f"{said}; go online, or give a path\n"
        assert result.stderr == ""


def test_a_hub_that_accepts_and_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    library = pytest.importorskip("huggingface_hub", reason="missing-extra: hub")
    monkeypatch.setattr(hub, "REACH_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(library, "hf_hub_url", lambda *_, **__: f"http://127.0.0.1:{silent.getsockname()[1]}/f")
        with pytest.raises(ModelNotFoundError, match=r"^hf:o/r/f.gguf: the hub cannot be reached"):
            resolve_model("hf:o/r/f.gguf")


def test_a_file_of_the_hub_s_cache_needs_no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = pytest.importorskip("huggingface_hub", reason="missing-extra: hub")
    monkeypatch.setattr(library, "try_to_load_from_cache", lambda *_, **__: str(tmp_path / "f.gguf"))
    monkeypatch.setattr(library, "get_hf_file_metadata", lambda url, timeout: pytest.fail("the hub is asked"))
    monkeypatch.setattr(library, "hf_hub_download", lambda *_, **__: str(tmp_path / "f.gguf"))

    assert resolve_model("hf:o/r/f.gguf") == tmp_path / "f.gguf"


def test_a_connection_that_breaks_halfway_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    library = pytest.importorskip("huggingface_hub", reason="missing-extra: hub")

    class ReadError(Exception):
        """Of an HTTP client, which need not be an OSError."""

    def break_off(*_: object, **__: object) -> None:
        raise ReadError("peer closed connection")

    monkeypatch.setattr(library, "get_hf_file_metadata", lambda url, timeout: None)
    monkeypatch.setattr(library, "hf_hub_download", break_off)
    with pytest.raises(ModelNotFoundError, match=r"^hf:o/r/f.gguf: the hub said no: peer closed connection$"):
        resolve_model("hf:o/r/f.gguf")


def hub_refusals() -> list[tuple[str, str]]:
    return [
        ("RepositoryNotFoundError", "the hub has no repository o/r"),
        ("GatedRepoError", "is gated; accept its terms"),
        ("RevisionNotFoundError", "has no revision v9"),
        ("EntryNotFoundError", r"o/r has no file f.gguf"),
        ("HFValidationError", "the hub said no: first line$"),
    ]


@pytest.mark.parametrize(("kind", "message"), hub_refusals())
def test_every_refusal_of_the_hub_is_one_sentence(kind: str, message: str) -> None:
    errors = pytest.importorskip("huggingface_hub.errors", reason="missing-extra: hub")
    refusal = getattr(errors, kind).__new__(getattr(errors, kind))
    refusal.args = ("first line\nsecond line",)

    def refuse(*_: object, **__: object) -> None:
        raise refusal

    library = types.SimpleNamespace(
        try_to_load_from_cache=lambda *_, **__: None,
        hf_hub_url=lambda *_, **__: "",
        get_hf_file_metadata=lambda url, timeout: None,
        hf_hub_download=refuse,
    )
    with pytest.raises(ModelNotFoundError, match=message) as caught:
        hub._download(library, "o/r", "f.gguf", "v9", "hf:o/r/f.gguf@v9")
    assert "\n" not in str(caught.value)
