"""Operations, ceilings and starts: what scenarios measure that are not made of requests."""

import mmap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pocketllm.bench.probes import page_cache
from pocketllm.bench.probes.attention import step
from pocketllm.bench.probes.cases import SMALL, some_blocks
from pocketllm.bench.probes.ceilings import measure_ceilings
from pocketllm.bench.probes.operations import make_cases
from pocketllm.bench.scenarios import load, op_latency
from pocketllm.bench.scenarios.contract import Point
from pocketllm.bench.targets.contract import Ask
from pocketllm.bench.targets.engine import EngineTarget
from pocketllm.engine.load import load_engine
from pocketllm.engine.options import EngineOptions
from pocketllm.errors import MachineError
from tests.parity.tiny_families import TinyFamily, write_family


@pytest.fixture(scope="module")
def targets(tiny_gguf: Path) -> Iterator[dict[str, Any]]:
    with load_engine(EngineOptions(model=str(tiny_gguf), threads=1, backend="reference")) as engine:
        yield {"base": EngineTarget(engine), "null": EngineTarget(engine)}


@pytest.fixture(scope="module")
def meters(targets: dict[str, Any]) -> dict[str, op_latency.OpMeter]:
    return op_latency.meters(targets)


@pytest.fixture(scope="module")
def meter(meters: dict[str, op_latency.OpMeter]) -> op_latency.OpMeter:
    return meters["base"]


def test_every_point_has_cases_and_every_case_a_point(meter: op_latency.OpMeter) -> None:
    labels = [point.label for point in op_latency.SCENARIO.points]

    # this backend leaves drawing to the host
    assert {case.op for case in meter.cases} | {"lifecycle", "draw"} == set(labels)
    assert len({case.name for case in meter.cases}) == len(meter.cases)


def test_a_latent_cache_is_timed_with_its_own_operations(tmp_path: Path) -> None:
    path = write_family(tmp_path / "tiny.gguf", TinyFamily("deepseek2"))
    with load_engine(EngineOptions(model=str(path), threads=1, backend="reference")) as engine:
        cases = {case.name: case for case in make_cases(engine) if case.op in ("attention", "store_kv")}
        assert cases["latent_attention ×1 over 129"].call().shape == (1, 4 * 32)

    assert {case.op for case in cases.values()} == {"attention", "store_kv"}
    assert cases["store_latent ×64"].num_bytes == 64 * 48 * (4 + 4)


def test_every_quant_type_of_the_backend_is_measured(meter: op_latency.OpMeter) -> None:
    measured = {case.name.split()[1] for case in meter.cases if case.op == "project"}

    assert measured == meter.engine.backend.capability.quant_types


def test_a_case_knows_the_least_it_moves_and_computes(meter: op_latency.OpMeter) -> None:
    case = next(case for case in meter.cases if case.name == "project Q6_K 2048→1024 ×8")

    assert case.num_bytes == 4 * (2048 * 1024 + 8 * (2048 + 1024))
    assert case.flops == 2 * 8 * 2048 * 1024
    assert case.call()[0].shape == (8, 1024)


def test_each_point_gives_samples_with_a_positive_cost(meter: op_latency.OpMeter) -> None:
    for point in op_latency.SCENARIO.points:
        samples = meter(point, "salt")

        if point.label == "draw":
            assert samples == []
            continue
        assert samples, point.label
        assert op_latency.op_costs([sample for _, sample in samples], {})["op"] > 0
        for ask, sample in samples:
            assert ask.prompt_id.startswith(point.label)
            assert sample.n_out == sum(sample.chunk_ntok) == ask.max_tokens


def test_arms_on_one_backend_share_the_prepared_cases(meters: dict[str, op_latency.OpMeter]) -> None:
    assert meters["base"] is meters["null"]


def test_a_call_costs_the_median_over_stamps_and_an_operation_the_geometric_mean() -> None:
    _, quick = op_latency.as_sample("a", 0, [1e-6, 1e-6, 7e-6], 1)
    _, slow = op_latency.as_sample("b", 0, [4e-4, 4e-4, 4e-4], 4)

    assert op_latency.call_s(quick) == pytest.approx(1e-6)
    assert op_latency.call_s(slow) == pytest.approx(1e-4)
    assert op_latency.op_costs([quick, slow], {})["op"] == pytest.approx(1e-5)
    assert op_latency.op_costs([], {}) == {}


def test_the_facts_carry_bytes_operations_and_ceilings(
    meter: op_latency.OpMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pocketllm.bench.probes.ceilings.READ_BYTES", 1 << 20)
    monkeypatch.setattr("pocketllm.bench.probes.ceilings.MATMUL_SIZE", 64)

    facts = meter.facts

    assert facts["backend"] == "reference"
    assert facts["ceilings"].keys() == {"read_gbs", "matmul_gflops"}
    assert all(value > 0 for value in facts["ceilings"].values())
    assert facts["cases"]["add ×1"] == {"bytes": 4 * 3 * 64, "flops": 0.0, "op": "add", "shape": "64", "rows": 1}


def test_ceilings_are_found_with_one_thread_and_with_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pocketllm.bench.probes.ceilings.READ_BYTES", 1 << 20)
    monkeypatch.setattr("pocketllm.bench.probes.ceilings.MATMUL_SIZE", 64)

    assert all(measure_ceilings(threads).read_gbs > 0 for threads in (1, 3))


def test_a_sequence_s_batch_has_its_new_tokens_after_the_cached_ones() -> None:
    batch = step(33, 2)

    assert batch.positions.tolist() == batch.slot_mapping.tolist() == [33, 34]
    assert batch.block_table.tolist() == [[0, 1, 2]]
    assert (batch.seq_lens.tolist(), batch.logit_rows.tolist()) == ([35], [1])


def test_several_sequences_in_a_step_have_blocks_of_their_own_from_the_first_one_on() -> None:
    batch = step(16, 1, seqs=2, first_block=6)

    assert batch.block_table.tolist() == [[6, 7], [8, 9]]
    assert batch.slot_mapping.tolist() == [7 * 16, 9 * 16]
    assert (batch.query_start_loc.tolist(), batch.logit_rows.tolist()) == ([0, 1, 2], [0, 1])


def test_made_up_blocks_hold_no_number_that_is_slow_or_not_finite() -> None:
    assert np.isfinite(some_blocks("F16", 4, 64).view(np.float16)).all()
    assert np.abs(some_blocks("F32", 4, 64).view(np.float32)).min() > 2.0**-126


# -- a device whose calls are launched together ------------------------------------------------------------------------
class Clock:
    """A unit that takes a microsecond a call."""

    def __init__(self, count: int) -> None:
        self.count = count

    def seconds(self) -> float:
        return 1e-6 * self.count


class FakeProbe:
    """Launches nothing; cannot launch `take`, which reads its rows on the host."""

    def __init__(self) -> None:
        self.cold_bytes = 3 * 4 * 1024 * 2048
        self.peer = self
        self.name = "another 1.0"
        self.copied: list[Any] = []
        self.finished = 0

    def resident(self, given: Any) -> Any:
        return given

    def copy(self, weight: Any) -> Any:
        self.copied.append(weight)
        return weight

    def finish(self, result: Any) -> None:
        self.finished += 1

    def together(self, calls: Any) -> Clock:
        if getattr(getattr(calls[0], "func", None), "__name__", "") == "take":
            raise RuntimeError("operation not permitted when stream is capturing\nmore of it")
        return Clock(len(calls))

    def ceilings(self) -> dict[str, float]:
        return {"copy_gbs": 4000.0, "bf16_gflops": 700_000.0}

    def product(self, rows: int, width: int, out: int) -> Any:
        return [lambda: None]

    def rms_norm(self, rows: int, width: int) -> Any:
        return [lambda: None]

    def attention(self, spec: Any, seqs: int, queries: int, keys: int) -> Any:
        return [] if queries > 1 else [lambda: None]


@pytest.fixture(scope="module")
def device_meter(targets: dict[str, Any]) -> op_latency.OpMeter:
    engine = targets["base"].engine
    backend = replace(engine.backend, probe=FakeProbe())
    as_much_of_it: Any = SimpleNamespace(**{**vars(engine), "backend": backend})
    return op_latency.OpMeter(as_much_of_it, SMALL)


def test_calls_go_through_more_weights_than_a_cache_holds(device_meter: op_latency.OpMeter) -> None:
    cases = {case.name: case for case in device_meter.cases}

    assert len(cases["project Q6_K 2048→1024 ×8"].calls) == 3
    assert len(cases["attention ×1 over 129"].calls) > 3
    tables = {tuple(call.args[3].block_table[0]) for call in cases["attention ×1 over 129"].calls}
    assert len(tables) == len(cases["attention ×1 over 129"].calls)


def test_captured_calls_are_timed_by_the_device_s_clock_in_launches_that_are_long_enough(
    device_meter: op_latency.OpMeter,
) -> None:
    [(_, sample), *_] = device_meter(Point("rms_norm"), "salt")

    assert op_latency.call_s(sample) == pytest.approx(1e-6, rel=1e-2)
    assert sample.chunk_ntok == sample.chunk_ntok[:1] * op_latency.DEVICE_STAMPS
    assert 250 <= sample.chunk_ntok[0] <= 251


def test_the_facts_tell_what_was_captured_and_what_another_library_took(device_meter: op_latency.OpMeter) -> None:
    facts = device_meter.facts
    cases = facts["cases"]

    assert (facts["peer"], facts["ceilings"]["copy_gbs"]) == ("another 1.0", 4000.0)
    product = cases["project Q6_K 2048→1024 ×8"]
    assert [product[key] for key in ("op", "type", "shape", "rows")] == ["project", "Q6_K", "2048→1024", 8]
    assert (product["timed"], product["own_s"], product["peer_s"]) == ("captured", *[pytest.approx(1e-6)] * 2)
    assert cases["to_numpy ×1"]["timed"] == "call by call"
    assert cases["take ×1"]["timed"] == "call by call: operation not permitted when stream is capturing"
    assert "peer_s" in cases["attention ×1 over 129"]
    assert "peer_s" not in cases["attention ×64 over 64"]


def test_what_calls_put_off_is_computed_where_they_are_not_captured(device_meter: op_latency.OpMeter) -> None:
    probe: Any = device_meter.engine.backend.probe
    before = probe.finished
    device_meter(Point("take"), "salt")

    assert probe.finished > before


# -- starts ------------------------------------------------------------------------------------------------------------
@pytest.fixture
def big_file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(bytes(1 << 22))
    return path


def test_a_file_that_is_read_through_is_resident(big_file: Path) -> None:
    page_cache.read_through(big_file)

    assert page_cache.resident_share(big_file) == 1.0


def test_a_dropped_file_is_not_resident(big_file: Path) -> None:
    try:
        page_cache.drop(big_file)
    except MachineError:
        pytest.skip("file-system-keeps-pages: the temporary folder cannot be dropped from the page cache")

    assert page_cache.resident_share(big_file) <= 0.01


def test_a_file_that_somebody_maps_cannot_be_dropped_and_that_is_told(big_file: Path) -> None:
    with big_file.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        assert sum(view[:: mmap.PAGESIZE]) == 0
        with pytest.raises(MachineError, match="of weights stays in the page cache"):
            page_cache.drop(big_file)


def test_a_start_ends_with_the_first_token_of_a_new_process(targets: dict[str, Any]) -> None:
    meter = load.meters(targets)["base"]
    [(ask, sample)] = meter(Point("warm"), "1")

    assert (sample.error, sample.n_out) == (None, 1)
    assert 0.05 < load.start_costs([sample], {})["start"] < 300
    assert ask.prompt_id == "start-1"


def test_a_start_that_fails_is_a_failed_sample_with_its_reason(tmp_path: Path) -> None:
    ask = Ask("start", (), "a prompt", 1)
    sample = load.first_token(ask, {"model": str(tmp_path / "nothing.gguf")})

    assert sample.error is not None
    assert "ended with 2: error: " in sample.error
    assert load.start_costs([sample], {}) == {}


def test_a_cold_start_reads_a_copy_that_nobody_maps(targets: dict[str, Any]) -> None:
    meter = load.meters(targets)["base"]
    [copy] = meter.copies()

    assert copy.read_bytes() == meter.files[0].read_bytes()
    assert copy != meter.files[0]
    assert meter.copies() == (copy,)
