"""The committed goldens come back: of the served models through every entry point, of each family's tiny checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pocketllm.engine.load import Engine
from pocketllm.engine.models.registry import known_architectures
from pocketllm.engine.options import EngineOptions
from pocketllm.errors import UnsupportedFeatureError
from pocketllm.golden.compare import Identical, Tie
from pocketllm.golden.files.folder import FixtureFolder
from pocketllm.golden.subject import open_subject, subject_of
from pocketllm.golden.verify import Report, VerifyOptions, verify_subject
from tests.golden import tiny_suite
from tests.golden.workshop import verified, verified_over_http, words
from tests.native import needs_native

FIXTURES = Path(__file__).resolve().parents[2] / "records" / "fixtures"
BACKENDS = [pytest.param("cpu", marks=needs_native), "reference"]


def assert_green(report: Report) -> None:
    assert {type(row.outcome) for row in report.rows} <= {Identical, Tie}, words(report)
    assert report.exit_code == 0
    assert report.stale == ()


def committed(path: Path, backend: str, record_dir: Path, **only: Any) -> Report:
    """Verify a served model's committed goldens; skips on a device that has none."""
    subject = open_subject(EngineOptions(model=str(path), backend=backend))
    if subject.plan.isa == "portable":
        pytest.skip("no-fixture-for-isa: portable")
    folder = FixtureFolder(FIXTURES / subject.name)
    assert folder.cases()
    # an answer of another hard key is no reason to skip: changed numerics or weights come out UNRECORDED, and red
    if not any(folder.path.glob(f"*.{subject.hard_key.label}.json")):
        pytest.skip(f"no-fixture-for-device: {subject.hard_key.label}")
    settings: dict[str, Any] = {"record_dir": record_dir, "require": True, "unreferenced": "reject", **only}
    return verify_subject(subject, VerifyOptions(subject.options, fixtures=FIXTURES, **settings))


@pytest.mark.model
@pytest.mark.parametrize("backend", [BACKENDS[0], pytest.param("reference", marks=pytest.mark.full)])
def test_the_committed_goldens_of_smollm2_come_back(smollm2: Path, tmp_path: Path, backend: str) -> None:
    assert_green(committed(smollm2, backend, tmp_path))


@pytest.mark.model
def test_the_shortest_goldens_of_smollm2_come_back_on_the_reference_backend(smollm2: Path, tmp_path: Path) -> None:
    few = {"cases": ("capital", "stop-string"), "entry_points": ("in_process",)}

    assert_green(committed(smollm2, "reference", tmp_path, **few))


@pytest.mark.full  # two minutes on two slow cores
@pytest.mark.model
@pytest.mark.parametrize("backend", [pytest.param("cpu", marks=needs_native)])
def test_the_committed_goldens_of_gemma3_270m_come_back(gemma3_270m: Path, tmp_path: Path, backend: str) -> None:
    assert_green(committed(gemma3_270m, backend, tmp_path))


@contextmanager
def tiny(architecture: str, backend: str, folder: Path) -> Iterator[tuple[Engine, Path]]:
    """A family's tiny checkpoint on a backend, and its fixtures; skips where there is nothing to run or to compare."""
    if not (tiny_suite.FIXTURES / f"tiny-{architecture}").is_dir():
        pytest.skip(f"no-golden-for-family: {architecture} (python -m tests.golden.tiny_suite {architecture})")
    path = tiny_suite.checkpoint(architecture, folder)
    try:
        engine = tiny_suite.opened(path, backend)
    except UnsupportedFeatureError as error:
        pytest.skip(f"backend-lacks-family: {architecture} on {backend} ({error})")
    root = folder / "fixtures"
    root.symlink_to(tiny_suite.FIXTURES)
    with engine:
        label = subject_of(engine).hard_key.label
        if not any((root / f"tiny-{architecture}").glob(f"*.{label}.json")):
            pytest.skip(f"no-fixture-for-device: {label} (python -m tests.golden.tiny_suite {architecture})")
        yield engine, root


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("architecture", known_architectures())
def test_the_tiny_checkpoint_of_every_family_answers_as_recorded(
    architecture: str, backend: str, tmp_path: Path
) -> None:
    with tiny(architecture, backend, tmp_path) as (engine, root):
        assert_green(verified(engine, root, require=True))


@pytest.mark.parametrize("backend", [BACKENDS[0], pytest.param("reference", marks=pytest.mark.full)])
@pytest.mark.parametrize("architecture", known_architectures())
def test_the_tiny_checkpoint_of_every_family_answers_as_recorded_over_http(
    architecture: str, backend: str, tmp_path: Path
) -> None:
    with tiny(architecture, backend, tmp_path) as (engine, root):
        assert_green(verified_over_http(engine, root, require=True))


def test_every_tiny_suite_holds_what_a_served_model_must_carry() -> None:
    folders = sorted(tiny_suite.FIXTURES.iterdir())
    assert folders

    for path in folders:
        cases = FixtureFolder(path).cases()
        paths = [one for case in cases for one in case.paths]
        assert {case.name for case in cases} == set(tiny_suite.cases("x")), path.name
        assert max(len(case.prompt_token_ids) for case in cases) > 256
        assert any(one.is_warm for one in paths)
        assert any(one.concurrency == 2 for one in paths)
        assert {one.is_stream for one in paths if one.is_http} == {True, False}
        assert sum(not case.is_greedy for case in cases) == 1
