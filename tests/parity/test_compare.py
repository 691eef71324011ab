"""The yardstick itself: figures of known differences, and records that say no."""

import json
from pathlib import Path

import httpx
import numpy as np
import pytest

from pocketllm.engine.backends.api.capability import BackendOptions
from pocketllm.engine.backends.select import select_backend
from tests.parity import record
from tests.parity.compare import Difference, compare, in_pieces, log_softmax
from tests.tiny import TinyLlama, write_llama


def test_equal_logits_differ_by_nothing() -> None:
    logits = np.random.default_rng(0).standard_normal((6, 9)).astype(np.float32)
    figures = compare([(logits, logits.copy())]).figures()

    assert figures == {"n": 6, "max_error": 0.0, "mean_error": 0.0, "nmse": 0.0, "top1": 1.0, "kl": 0.0}


def test_known_differences_give_their_known_figures() -> None:
    oracle = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]))
    ours = np.log(np.array([[0.25, 0.5, 0.25], [0.1, 0.1, 0.8]]))
    figures = compare([(ours, oracle)]).figures()

    assert figures["top1"] == 0.5
    assert figures["kl"] == pytest.approx((0.5 * np.log(2) - 0.25 * np.log(2)) / 2)
    assert figures["max_error"] == pytest.approx(np.log(2))
    assert figures["mean_error"] == pytest.approx(2 * np.log(2) / 6)
    assert figures["nmse"] == pytest.approx(2 * np.log(2) ** 2 / (oracle**2).sum())


def test_pieces_give_the_figures_of_the_whole() -> None:
    random = np.random.default_rng(1)
    ours, oracle = random.standard_normal((2, 70, 11))

    assert compare(in_pieces(ours, oracle)).figures() == pytest.approx(compare([(ours, oracle)]).figures())


def test_log_softmax_survives_large_logits() -> None:
    assert np.allclose(np.exp(log_softmax(np.array([[1000.0, 1000.0], [-1000.0, 0.0]]))).sum(-1), 1.0)


def test_a_checkpoint_that_is_not_the_oracles_is_told_and_recorded_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pocketllm.evidence.store import list_records

    right = np.load(record.ORACLES / "llama.npz")
    np.savez(tmp_path / "wrong.npz", input_ids=right["input_ids"], logits=right["logits"])
    write_llama(tmp_path / "wrong.gguf", TinyLlama(seed=99))
    monkeypatch.setattr(record, "ORACLES", tmp_path)
    to = record.Recorder(select_backend("reference", BackendOptions(threads=1)), tmp_path / "records", keep=False)
    passed = record.write_record(to, tmp_path / "wrong.gguf", record.tiny_rows(to, "wrong"))
    [kept] = list_records([tmp_path / "records"])

    assert not passed
    assert capsys.readouterr().out.count("FAIL") == 4
    assert kept.document["model"]["architecture"] == "llama"
    assert [row["passed"] for row in kept.row_dicts] == [False] * 4


def test_llama_servers_answer_is_read_by_token_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "TOLD", 2)
    row = np.log(np.array([0.3, 0.2, 0.5]))

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/props":
            return httpx.Response(200, json={"build_info": "b1"})
        body = json.loads(request.content)
        assert (body["n_predict"], body["n_probs"]) == (1, 2)
        top = [{"id": 2, "logprob": row[2]}, {"id": 0, "logprob": row[0]}]
        return httpx.Response(200, json={"completion_probabilities": [{"top_logprobs": top}]})

    client = httpx.Client(base_url="http://server", transport=httpx.MockTransport(answer))
    monkeypatch.setattr(httpx, "Client", lambda **_: client)
    same = record.against_llama_cpp("x", "http://server", "", np.array([5, 6]), np.stack([row, row]))

    assert (same["n"], same["top1"], same["oracle_version"], same["passed"]) == (2, 1.0, "b1", True)
    assert same["kl"] == pytest.approx(0.0, abs=1e-12)


def test_the_rest_of_a_distribution_is_one_outcome() -> None:
    assert np.exp(record.with_rest(np.log(np.array([0.5, 0.2])))).tolist() == [pytest.approx([0.5, 0.2, 0.3])]


def test_kl_or_top1_outside_their_bounds_fail_a_real_checkpoint() -> None:
    oracle = np.random.default_rng(2).standard_normal((64, 30))
    exact, far = compare([(oracle, oracle)]), compare([(oracle[:, ::-1], oracle)])
    ids = np.arange(64)

    assert record.real_row("x", "o", "1", ids, exact, 1e-5, 0.995, "")["passed"] is True
    assert record.real_row("x", "o", "1", ids, far, 1e9, 0.995, "")["passed"] is False
    assert record.real_row("x", "o", "1", ids, far, 1e-5, 0.0, "")["passed"] is False
    assert Difference().n == 0


def test_another_likeliest_token_is_a_tie_only_where_the_oracle_hardly_prefers_its_own() -> None:
    oracle = np.log(np.array([[0.5, 0.3, 0.2], [0.42, 0.38, 0.2], [0.1, 0.1, 0.8]]))
    tie = compare([(oracle + np.array([[0, 0, 0], [0, 0.2, 0], [0, 0, 0]]), oracle)])
    clear = compare([(oracle + np.array([[0, 1, 0], [0, 0, 0], [0, 0, 0]]), oracle)])
    ids = np.arange(3)

    assert tie.widest_flip == pytest.approx(np.log(0.42 / 0.38))
    assert clear.widest_flip == pytest.approx(np.log(0.5 / 0.3))
    assert record.real_row("x", "o", "1", ids, tie, 1.0, 0.5, "", 0.15)["passed"] is True
    assert record.real_row("x", "o", "1", ids, clear, 1.0, 0.5, "", 0.15)["passed"] is False
