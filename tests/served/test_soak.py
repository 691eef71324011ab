"""The soak in small: a few seconds in every run, a minute against a process of its own in the full one."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from pocketllm.evidence.pages import page, summary
from pocketllm.evidence.store import load_record
from tests.served.conftest import load_served
from tests.served.soak import main, soak, start_server, stop_server
from tests.served.soak_clients import Outcome


def test_two_seconds_of_random_clients_leave_nothing_behind(tiny_gguf: Path) -> None:
    server = load_served(tiny_gguf)
    server.state.names = ("soaked",)
    try:
        outcome = asyncio.run(soak(server.url, os.getpid(), 2.0, num_clients=4, seed=1, context=300))
    finally:
        server.stop()
        server.engine.close()
    outcome.check(with_memory=False)

    assert outcome.faults == []
    assert set(outcome.kinds) == {"stream", "whole", "leave", "cancel", "bad", "other_address"}
    assert set(outcome.statuses) <= {200, 400, 404, 413}
    assert json.loads(json.dumps(outcome.as_dict()))["num_faults"] == 0


def test_a_soak_calls_a_leak_and_a_server_that_grows_by_name() -> None:
    outcome = Outcome(rss_mib=[100.0] * 15 + [105.0] * 5, kv_usage_at_end=0.25, running_at_end=1)
    outcome.check()

    assert [fault.split()[0] for fault in outcome.faults] == ["kv_cache_usage_perc", "1", "the"]
    assert "5.0%" in outcome.faults[2]


def test_a_soak_leaves_a_record_that_tells_its_figures(
    tiny_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--model",
        str(tiny_gguf),
        "--minutes",
        "0.05",
        "--clients",
        "2",
        "--context",
        "300",
        "--kv-cache-mib",
        "1",
    ]
    code = main([*words, "--kv-cache-mib", "1", "--record-dir", str(tmp_path)])
    [record] = [load_record(path) for path in tmp_path.iterdir()]
    outcome = record.document["outcome"]

    assert record.complete
    assert record.document["model"]["architecture"] == "llama"
    assert record.document["plan"]["kv_bytes"] <= 2**20
    assert record.row_dicts[-1]["n_requests"] <= sum(outcome["kinds"].values())
    assert [fault for fault in outcome["faults"] if "memory" not in fault] == []  # seconds say nothing of memory
    assert code == (1 if outcome["faults"] else 0)
    assert json.loads(capsys.readouterr().out)["kinds"] == outcome["kinds"]
    assert "min: " in summary(record)
    assert any("Memory of the server" in line for line in page(record))


@pytest.mark.full
def test_a_minute_of_sixteen_clients_against_a_process(tiny_gguf: Path, tmp_path: Path) -> None:
    errors = tmp_path / "stderr.txt"
    process, url = start_server(str(tiny_gguf), ["--threads", "1"], errors)
    try:
        outcome = asyncio.run(soak(url, process.pid, 60.0, num_clients=16, seed=2, context=400))
    finally:
        ended = stop_server(process, errors)
    outcome.check(with_memory=False)

    assert outcome.faults + ended == []
