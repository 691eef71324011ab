"""The CPU backend's runtime: how memory is shared, what a captured forward promises, and threads that share well."""

import errno
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pocketllm.engine.backends.api.attention import ForwardBatch
from pocketllm.engine.backends.api.ops import Norm, Projection
from pocketllm.engine.backends.cpu.library import Engine
from pocketllm.engine.backends.cpu.program import TOKENS, Command, Value, lay_out
from pocketllm.errors import MachineError, OptionError, UnsupportedFeatureError
from tests.native import cpu_ops
from tests.unit.test_ops import normal, one_sequence

LIBRARY = "POCKETLLM_CPU_LIBRARY"


# -- starting ----------------------------------------------------------------------------------------------------------
def test_threads_that_the_machine_does_not_start_are_an_error_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    library = cpu_ops().engine.library
    monkeypatch.setattr(library, "engine_new", lambda threads, isa: None)
    monkeypatch.setattr(library, "problem", lambda: os.strerror(errno.EAGAIN).encode())

    with pytest.raises(MachineError, match=r"starts no 4000 threads now: lower --threads"):
        Engine(4000, None)


# -- which memory a value gets -----------------------------------------------------------------------------------------
@st.composite
def recordings(draw: st.DrawFn) -> tuple[list[Command], Value]:
    """Operations over values made before them, of all kinds: in place or not, with outputs that nobody reads."""
    commands: list[Command] = []
    values: list[Value] = []
    for _ in range(draw(st.integers(1, 25))):
        inputs = tuple(draw(st.lists(st.sampled_from(values), max_size=3, unique_by=id))) if values else ()
        outputs = tuple(Value(draw(st.sampled_from([1, 2, 3])), TOKENS) for _ in range(draw(st.integers(1, 2))))
        in_place = ((0, draw(st.integers(0, len(inputs) - 1))),) if inputs and draw(st.booleans()) else ()
        commands.append(Command(lambda *_: None, inputs, outputs, in_place))
        values.extend(outputs)
    return commands, draw(st.sampled_from(values))


@given(recordings())
def test_nothing_is_overwritten_before_its_last_use(recording: tuple[list[Command], Value]) -> None:
    commands, result = recording
    layout = lay_out(commands, result)
    holds: dict[int, Value] = {}
    for command in commands:
        assert all(holds[layout.slot_of[value]] is value for value in command.inputs)
        taken = [layout.slot_of[output] for output in command.outputs]
        replaced = {layout.slot_of[command.inputs[source]] for _, source in command.in_place}
        assert len(set(taken)) == len(taken)
        assert set(taken) & {layout.slot_of[value] for value in command.inputs} <= replaced
        holds.update(zip(taken, command.outputs, strict=True))
        assert all(value.width <= layout.widths[slot] for slot, value in holds.items())

    assert holds[layout.slot_of[result]] is result


def test_a_chain_of_operations_in_place_needs_one_slot() -> None:
    first = before = Value(8, TOKENS)
    commands = [Command(lambda *_: None, (), (first,))]
    for _ in range(5):
        after = Value(8, TOKENS)
        commands.append(Command(lambda *_: None, (before,), (after,), ((0, 0),)))
        before = after

    assert lay_out(commands, before).widths == [8]


# -- a captured forward ------------------------------------------------------------------------------------------------
WEIGHTS = normal(40, 64), normal(64, 40, seed=1), normal(64, seed=2)


def forward(ops: Any) -> Any:
    """A little network with a residual, captured for up to 50 tokens."""
    up, down, table = (
        ops.load_matrix(w.view(np.uint8).reshape(-1), "F32", w.shape) for w in (*WEIGHTS[:2], WEIGHTS[0])
    )
    norm = Norm(ops.load_vector(WEIGHTS[2]), 1e-5)

    def run(batch: ForwardBatch) -> Any:
        x = ops.embed(table, batch.input_ids)
        (hidden,) = ops.project(x, Projection(up), norm=norm)
        x = ops.project_add(ops.silu_mul(hidden, hidden), Projection(down), x)
        return ops.rms_norm(ops.take(x, batch.logit_rows), norm)

    return run


def some_batch(tokens: int, seed: int = 0) -> ForwardBatch:
    batch = one_sequence(tokens, 0, list(range(10)), 16)
    ids = np.random.default_rng(seed).integers(0, 40, tokens).astype(np.int32)
    return replace(batch, input_ids=ids, logit_rows=np.arange(tokens - 1, -1, -2, dtype=np.int32))


def test_a_captured_forward_gives_the_bits_of_its_operations_one_by_one() -> None:
    ops = cpu_ops(2)
    run = forward(ops)
    captured = ops.capture(run, 50)
    for tokens in (1, 50, 7, 1):
        assert np.array_equal(captured(some_batch(tokens, tokens)), run(some_batch(tokens, tokens)))


def test_two_captured_forwards_do_not_share_their_results() -> None:
    ops = cpu_ops(2)
    one, other = ops.capture(forward(ops), 50), ops.capture(forward(ops), 50)
    result = one(some_batch(9))
    kept = result.copy()
    other(some_batch(30, seed=5))

    assert np.array_equal(result, kept)


def test_more_tokens_than_were_captured_for_are_refused() -> None:
    ops = cpu_ops(1)
    captured = ops.capture(forward(ops), 50)

    with pytest.raises(ValueError, match="a step of 51 tokens in a program for 50"):
        captured(some_batch(51))
    assert len(captured(some_batch(50))) == 25


def test_a_forward_that_looks_into_the_batch_fails_while_it_is_captured() -> None:
    ops = cpu_ops(1)

    with pytest.raises(TypeError):
        ops.capture(lambda batch: ops.add(batch.num_tokens, batch.num_tokens), 4)
    assert len(ops.capture(forward(ops), 50)(some_batch(3))) == 2


def test_a_step_costs_python_little() -> None:
    ops = cpu_ops(1)
    captured, batch = ops.capture(forward(ops), 50), some_batch(1)
    costs = []
    for _ in range(300):
        start = time.thread_time()
        captured(batch)
        costs.append(time.thread_time() - start)

    assert min(costs) < 50e-6


def test_time_is_told_by_kind_of_phase() -> None:
    from pocketllm.engine.backends.cpu import profile

    ops = cpu_ops(2)
    captured = ops.capture(forward(ops), 50)
    captured(some_batch(3))
    assert profile.figures(ops.engine) == {}
    ops.engine.library.profile_start(ops.engine.address)
    for _ in range(4):
        captured(some_batch(3))
    found = profile.figures(ops.engine)

    assert {kind: calls for kind, (calls, *_) in found.items()} == {
        "embed": 4, "norm": 8, "multiply": 8, "elementwise": 4, "take": 4
    }  # fmt: skip
    assert found["multiply"][3] == 4 * 2 * 2 * 40 * 64 * 3
    assert "multiply" in profile.report(ops.engine)


# -- threads -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_any_number_of_threads_gives_the_same_bits(threads: int) -> None:
    ops, one = cpu_ops(threads), cpu_ops(1)
    x, weight = normal(37, 512), normal(1000, 512, seed=1)
    results = [
        o.project(x, Projection(o.load_matrix(weight.view(np.uint8).reshape(-1), "F32", weight.shape)))[0]
        for o in (ops, one)
    ]

    assert np.array_equal(*results)


def test_callers_in_several_threads_take_turns() -> None:
    ops = cpu_ops(2)
    run = forward(ops)
    expected = [np.array(run(some_batch(40, seed))) for seed in range(5)]
    right: list[bool] = []

    def call(seed: int) -> None:
        right.extend(np.array_equal(run(some_batch(40, seed)), expected[seed]) for _ in range(50))

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert right == [True] * 250


def script(text: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own."""
    cpu_ops(1)  # skips where there is no library
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=timeout, cwd=root, check=False
    )


SETUP = """
import os, sys, time
import numpy as np
from pocketllm.engine.backends.cpu.ops import CpuOps
ops = CpuOps(4)
x = np.ones((200, 4000), np.float32)
assert (ops.add(x, x) == 2).all()
"""


def test_a_forked_child_computes_too() -> None:
    done = script(
        SETUP
        + """
child = os.fork()
if child == 0:
    ok = (ops.add(x, x) == 2).all() and (CpuOps(2).add(x, x) == 2).all()
    os._exit(0 if ok else 1)
_, status = os.waitpid(child, 0)
assert (ops.add(x, x) == 2).all()
sys.exit(os.waitstatus_to_exitcode(status))
"""
    )

    assert (done.returncode, done.stderr) == (0, "")


def test_waiting_threads_sleep_and_let_the_process_end() -> None:
    done = script(
        SETUP
        + """
time.sleep(0.05)
start = time.process_time()
time.sleep(0.4)
print(time.process_time() - start)
"""
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert float(done.stdout) < 0.1


def test_torch_is_not_loaded() -> None:
    done = script(
        SETUP
        + """
from pathlib import Path
from tests.native import cpu_ops
from pocketllm.engine.models.registry import find_family
from pocketllm.engine.weights.checkpoint import open_checkpoint
checkpoint = open_checkpoint(Path("tests/oracles/q_Q4_K.gguf"))
find_family(checkpoint.architecture).load(checkpoint, ops, 64)
print([name for name in ("torch", "scipy", "gguf") if name in sys.modules])
"""
    )

    assert (done.returncode, done.stdout) == (0, "[]\n")


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Programs that want a core each."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.3)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_throughput_falls_in_proportion_when_cores_are_taken_away() -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ops = cpu_ops(cores)
    matrix = normal(512, 512)
    projection = Projection(ops.load_matrix(matrix.view(np.uint8).reshape(-1), "F32", matrix.shape))

    def chain(batch: ForwardBatch) -> Any:
        x = ops.embed(projection.weight, batch.input_ids)
        for _ in range(100):
            (x,) = ops.project(x, projection)
        return x

    captured, batch = ops.capture(chain, 4), some_batch(2)

    def seconds_of_steps() -> float:
        times = []
        for _ in range(40):
            start = time.perf_counter()
            captured(batch)
            times.append(time.perf_counter() - start)
        return float(np.mean(times))

    seconds_of_steps()
    alone = min(seconds_of_steps() for _ in range(3))
    with busy_processes(cores):
        shared = min(seconds_of_steps() for _ in range(3))

    # half the cores are left; threads that spin or wait for one another would lose a factor of ten and more
    assert shared < 6 * alone


# -- the library -------------------------------------------------------------------------------------------------------
def test_a_library_that_is_not_there_or_not_ours_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pocketllm.engine.backends.cpu.library import open_library

    for path, message in ((tmp_path / "none.so", "there is no file .*none.so"), (Path(__file__), "cannot be used")):
        monkeypatch.setenv(LIBRARY, str(path))
        open_library.cache_clear()
        with pytest.raises(OptionError, match=message):
            open_library()
    monkeypatch.undo()
    open_library.cache_clear()


def test_a_library_of_another_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from pocketllm.engine.backends.cpu import library

    cpu_ops(1)
    monkeypatch.setattr(library, "ABI_VERSION", 10**6)
    library.open_library.cache_clear()
    kind = OptionError if library.PATH_VARIABLE in os.environ else UnsupportedFeatureError
    with pytest.raises(kind, match="the package needs 1000000: install the package again"):
        library.open_library()
    monkeypatch.undo()
    library.open_library.cache_clear()


def test_an_instruction_set_that_was_not_built_is_told_from_one_that_is_not_known() -> None:
    other = "avx2" if platform.machine() in ("aarch64", "arm64") else "neon"
    cpu_ops()  # skips where there is no library

    with pytest.raises(ValueError, match=f"kernels for {other} were not built; this build has: .*portable"):
        Engine(1, other)
    with pytest.raises(ValueError, match=r"no instruction set is called sse9; this build has: .*portable"):
        Engine(1, "sse9")
