"""Which backend runs, and what the device is."""

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest

from pocketllm.engine.backends import select
from pocketllm.engine.backends.api import device
from pocketllm.engine.backends.api.capability import BackendBid, BackendOptions
from pocketllm.engine.backends.cpu import device as cpu
from pocketllm.engine.backends.cpu import library
from pocketllm.engine.backends.reference import device as reference
from pocketllm.engine.models.contract import KVSpec
from pocketllm.errors import OptionError, UnsupportedFeatureError
from tests.native import forget_library, needs_native, without_native

ONE_THREAD = BackendOptions(threads=1)


@pytest.fixture(autouse=True)
def the_real_library() -> Iterator[None]:
    """Whatever a test made of the library, the next one looks for it again."""
    yield
    forget_library()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Install out-of-tree backends, each a module made from source."""
    monkeypatch.syspath_prepend(str(tmp_path))
    points: list[EntryPoint] = []
    monkeypatch.setattr(select, "entry_points", lambda group: points if group == select.GROUP else [])
    select.out_of_tree.cache_clear()

    def install(name: str, source: str) -> None:
        (tmp_path / f"{name}_device.py").write_text(source)
        points.append(EntryPoint(name, f"{name}_device", select.GROUP))
        select.out_of_tree.cache_clear()

    yield install
    select.out_of_tree.cache_clear()
    for point in points:
        sys.modules.pop(point.value, None)


FAST = """
from dataclasses import replace
from pocketllm.engine.backends.api.capability import BackendBid
from pocketllm.engine.backends.reference import device
RANK = 20
def bid(facts, options):
    return BackendBid("fast", replace(device.declare(facts, options), name="fast"), "quick")
def open_backend(facts, options):
    opened = device.open_backend(facts, options)
    return type(opened)(replace(opened.capability, name="fast"), opened.ops)
"""
ABSENT = """
from pocketllm.engine.backends.api.capability import BackendBid
RANK = 99
def bid(facts, options):
    return BackendBid("absent", None, "no such card in this machine")
def open_backend(facts, options):
    raise AssertionError("opened a backend that did not bid")
"""


def test_auto_takes_the_reference_where_nothing_else_is_installed(installed, monkeypatch: pytest.MonkeyPatch) -> None:
    with without_native(monkeypatch):
        backend = select.select_backend("auto", ONE_THREAD)

    assert backend.capability.name == "reference"
    assert backend.capability.device == "cpu"
    assert backend.capability.batch_invariant_width >= 512


def test_an_unknown_backend_lists_the_known_ones(installed) -> None:
    installed("fast", FAST)
    with pytest.raises(UnsupportedFeatureError, match=r"'tpu'.*known: auto, cpu, cuda, reference, fast"):
        select.select_backend("tpu")


def test_auto_takes_the_best_that_bids_and_an_explicit_name_is_kept(installed) -> None:
    installed("fast", FAST)
    installed("absent", ABSENT)

    names = [bid.name for bid in select.bids()]
    assert [name for name in names if name not in ("cpu", "cuda")] == ["fast", "reference", "absent"]
    assert select.select_backend("auto", ONE_THREAD).capability.name == "fast"
    assert select.select_backend("reference", ONE_THREAD).capability.name == "reference"


def test_an_explicit_backend_that_cannot_run_says_why_and_nothing_takes_its_place(installed) -> None:
    installed("absent", ABSENT)
    with pytest.raises(UnsupportedFeatureError, match="absent: no such card in this machine"):
        select.select_backend("absent")


def test_a_backend_that_fails_to_import_fails_with_its_own_error(installed) -> None:
    installed("broken", "import a_module_that_is_not_there")
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        select.bids()


def test_two_packages_cannot_claim_one_name(installed) -> None:
    installed("reference", FAST)
    with pytest.raises(UnsupportedFeatureError, match="both reference_device and pocketllm itself claim this name"):
        select.bids()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (BackendOptions(activation_dtype="int8"), "--activation-dtype int8: this backend has float32 only"),
        (BackendOptions(kv_dtype="float16"), "--kv-dtype float16: this backend has float32 only"),
        (BackendOptions(activation_dtype="float32", kv_dtype="float32"), None),
    ],
)
def test_the_reference_refuses_a_dtype_that_it_cannot_honor(options: BackendOptions, reason: str | None) -> None:
    if reason is None:
        assert select.offers("reference", options)[0].capability is not None
        return
    with pytest.raises(UnsupportedFeatureError, match=reason):
        select.offers("reference", options)


def test_a_capability_says_how_many_threads_it_became() -> None:
    [bid] = select.offers("reference", BackendOptions(threads=3))

    assert bid.capability is not None
    assert bid.capability.threads == 3


def test_without_torch_the_reference_bids_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "find_spec", lambda name: None)

    assert reference.bid(device.read_facts(), BackendOptions()) == BackendBid(
        "reference", None, "torch is not installed: pip install torch"
    )


# -- the native library ------------------------------------------------------------------------------------------------
def test_an_explicit_cpu_backend_without_its_library_is_an_error_that_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "native_build.txt").write_text("not built: no C++ compiler was found (c++, g++ or clang++, or CXX)\n")
    monkeypatch.delenv(library.PATH_VARIABLE, raising=False)
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    forget_library()
    with pytest.raises(UnsupportedFeatureError) as caught:
        select.select_backend("cpu")
    monkeypatch.undo()

    assert caught.value.reasons == (
        "cpu: its native library was not built: no C++ compiler was found (c++, g++ or clang++, or CXX): install a "
        "C++17 compiler and install the package again, or take --backend reference",
    )


@needs_native
def test_a_library_of_another_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_library()
    monkeypatch.setattr(library, "ABI_VERSION", library.ABI_VERSION + 1)
    [bid] = [bid for bid in select.bids() if bid.name == "cpu"]

    assert bid.capability is None
    assert bid.reason.endswith(f"the package needs {library.ABI_VERSION}: install the package again")


def test_a_file_that_is_no_library_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "lib.so").write_text("not a library")
    monkeypatch.setenv(library.PATH_VARIABLE, str(tmp_path / "lib.so"))
    forget_library()
    with pytest.raises(OptionError, match=r"POCKETLLM_CPU_LIBRARY: .*lib\.so cannot be used"):
        select.offers("auto")


@needs_native
def test_a_lower_instruction_set_can_be_had_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu.ISA_VARIABLE, "portable")
    capability = select.select_backend("cpu", ONE_THREAD).capability

    assert capability.isa == "portable"
    assert "unfused" in capability.numerics_version


@needs_native
def test_an_instruction_set_that_is_not_there_is_an_error_and_nothing_takes_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(cpu.ISA_VARIABLE, "sse9")
    with pytest.raises(OptionError, match=r"POCKETLLM_CPU_ISA='sse9' cannot be had here; there are .*portable"):
        select.offers("auto")


@needs_native
@pytest.mark.parametrize(("dtype", "bytes_of_a_head"), [("float32", 512), ("float16", 256), ("int8", 136)])
def test_what_the_cache_costs_follows_its_dtype(dtype: str, bytes_of_a_head: int) -> None:
    [bid] = select.offers("cpu", BackendOptions(kv_dtype=dtype))
    assert bid.capability is not None
    spec = KVSpec(num_layers=1, num_kv_heads=1, key_dim=64, value_dim=64)
    needed = spec.bytes_per_token(bid.capability.kv_element_bytes, bid.capability.kv_scale_bytes)

    assert needed == bytes_of_a_head


def test_bidding_imports_no_torch() -> None:
    code = "import sys; from pocketllm.engine.backends.select import bids; bids(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "False"


# -- facts of the machine ---------------------------------------------------------------------------------------------
@pytest.fixture
def cgroup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cgroup tree of our own, with this process in /outer/inner."""
    monkeypatch.setattr(device, "CGROUPS", tmp_path)
    folder = tmp_path / "outer" / "inner"
    folder.mkdir(parents=True)
    monkeypatch.setattr(device, "own_cgroups", lambda: [folder, folder.parent, tmp_path])
    return folder


@pytest.mark.parametrize(
    ("inner", "outer", "cores"),
    [("max 100000", "max 100000", 64), ("250000 100000", "max 100000", 2), ("max 100000", "50000 100000", 1)],
)
def test_cores_are_those_that_affinity_and_the_tightest_quota_leave(
    cgroup: Path, monkeypatch: pytest.MonkeyPatch, inner: str, outer: str, cores: int
) -> None:
    monkeypatch.setattr(device.os, "sched_getaffinity", lambda pid: range(64), raising=False)
    (cgroup / "cpu.max").write_text(inner)
    (cgroup.parent / "cpu.max").write_text(outer)

    assert device.num_usable_cores() == cores


def test_affinity_alone_limits_too(cgroup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.os, "sched_getaffinity", lambda pid: {3, 5}, raising=False)

    assert device.num_usable_cores() == 2


def test_an_old_cgroups_quota_counts(cgroup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.os, "sched_getaffinity", lambda pid: range(8), raising=False)
    (device.CGROUPS / "cpu").mkdir()
    (device.CGROUPS / "cpu" / "cpu.cfs_quota_us").write_text("300000")
    (device.CGROUPS / "cpu" / "cpu.cfs_period_us").write_text("100000")

    assert device.num_usable_cores() == 3


def test_memory_is_the_tightest_cgroups_less_what_cannot_be_dropped(cgroup: Path) -> None:
    (cgroup / "memory.max").write_text("max")
    (cgroup.parent / "memory.max").write_text("1000000")
    (cgroup.parent / "memory.current").write_text("700000")
    (cgroup.parent / "memory.stat").write_text("anon 100000\ninactive_file 600000\n")
    facts = device.read_facts()

    assert facts.memory_bytes == 1_000_000
    assert facts.available_bytes == 900_000


def test_facts_of_this_machine_make_sense() -> None:
    facts = device.read_facts()

    assert facts.cpu_name
    assert facts.num_cores >= 1
    assert 0 < facts.available_bytes <= facts.memory_bytes


@needs_native
def test_a_cache_that_the_cpu_has_not_is_refused_without_words_of_what_nobody_asked_for() -> None:
    refused = cpu.bid(device.read_facts(), BackendOptions(kv_dtype="fp8_e4m3")).reason

    assert refused == "--kv-dtype fp8_e4m3: this backend has float32, float16, bfloat16, int8"


@pytest.mark.parametrize("backend", [pytest.param(cpu, marks=needs_native), reference])
def test_more_threads_than_cores_are_not_called_cores(backend: ModuleType) -> None:
    bid = backend.bid(device.read_facts(), BackendOptions(threads=1000))

    assert " on 1000 threads of " in bid.reason
