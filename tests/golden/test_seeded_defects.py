"""Defects put into the engine on purpose, each caught by a golden under its right name; and one harmless change.

Weights and fixtures stay what they are: only code is changed, so that the hard key is the recorded one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.nn import functional

from pocketllm.engine.backends.reference.ops import ReferenceOps
from pocketllm.engine.backends.reference.rows import pad_rows
from pocketllm.engine.lifecycle.kv.prefix_cache import PrefixCache
from pocketllm.engine.lifecycle.request import FinishEvent
from pocketllm.engine.lifecycle.sampling.sampler import Sampler
from pocketllm.engine.llm import LLM
from pocketllm.engine.models import blocks
from pocketllm.engine.models.families.llama import LlamaModel
from pocketllm.engine.serving.stream import Reply, Usage
from pocketllm.engine.text.chat_template import ChatTemplate
from pocketllm.engine.text.stop_strings import StopChecker
from pocketllm.engine.text.tokenizer import Tokenizer
from pocketllm.engine.weights.reading import Reading
from pocketllm.golden.compare import Diverged, Drift, Identical, Outcome, Regression, Tie
from pocketllm.golden.verify import Report
from tests.golden.workshop import GREEDY, opened, record_cases, rows, stop_string, verified, verified_over_http, words
from tests.tiny import TinyLlama, weights, write_llama

PROMPT = "Once upon a time there was a prompt that filled more than two blocks of the cache, and then some."
BOS = {"tokenizer.ggml.add_bos_token": True}

Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama whose matrices are packed in blocks of 32, and whose prompts begin with BOS."""
    return write_llama(
        tmp_path_factory.mktemp("tiny") / "tiny.gguf", TinyLlama(seed=3, quant_type="Q8_0", metadata=BOS)
    )


@pytest.fixture(scope="module")
def root(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Goldens of the sound engine: a long prompt, a chat, a stop string and a draw."""
    root = tmp_path_factory.mktemp("goldens")
    with opened(tiny) as engine:
        stop = stop_string(engine, PROMPT, 40)
        cases = {
            "long": {
                "prompt": PROMPT,
                "sampling": {"max_tokens": 24, **GREEDY},
                "paths": ["in_process", "in_process:warm", "http_completions", "http_completions:stream"],
            },
            "chat": {
                "messages": [{"role": "user", "content": "hello"}],
                "sampling": {"max_tokens": 12, **GREEDY},
                "paths": ["in_process", "http_chat", "http_chat:stream"],
            },
            "stop": {
                "prompt": PROMPT,
                "sampling": {"max_tokens": 40, "stop": [stop], **GREEDY},
                "paths": ["in_process"],
            },
            "draw": {
                "prompt": PROMPT,
                "sampling": {"max_tokens": 12, "temperature": 1.0, "seed": 5, "ignore_eos": True},
                "paths": ["in_process"],
            },
        }
        folder = record_cases(engine, root, cases)
    assert folder.answers("stop")[0].expected.finish_reason == "stop"
    return root


def outcome(report: Report, case: str, path: str = "in_process", check: str = "tokens") -> Outcome:
    [found] = [row.outcome for row in rows(report, case, check) if str(row.path) == path]
    return found


def asked(tiny: Path, root: Path) -> Report:
    with opened(tiny) as engine:
        return verified(engine, root)


def test_the_sound_engine_is_identical_in_every_way(tiny: Path, root: Path) -> None:
    with opened(tiny) as engine:
        report = verified(engine, root)
    with opened(tiny) as engine:
        served = verified_over_http(engine, root)

    assert set(words(report).values()) | set(words(served).values()) == {"IDENTICAL"}
    assert {row.check for row in (*report.rows, *served.rows)} == {"tokens", "scored"}
    assert [row.observed.num_cached_tokens for row in rows(report, "long") if row.path.is_warm] != [0]


# -- the model ---------------------------------------------------------------------------------------------------------
def test_a_rope_base_off_by_one_percent_is_caught(tiny: Path, root: Path, monkeypatch: Patch) -> None:
    sound = blocks.read_rope

    def off(*words: Any) -> Any:
        spec = sound(*words)
        return replace(spec, theta=spec.theta * 1.01)

    monkeypatch.setattr(blocks, "read_rope", off)
    report = asked(tiny, root)

    assert isinstance(outcome(report, "long", check="scored"), Drift)
    assert isinstance(outcome(report, "long"), Drift | Regression)


def renamed(swap: dict[str, str]) -> Callable[[Reading, str], Any]:
    sound = Reading.data

    def data(self: Reading, name: str) -> Any:
        return sound(self, swap.get(name, name))

    return data


def test_two_layers_weights_swapped_are_caught(tiny: Path, root: Path, monkeypatch: Patch) -> None:
    one, other = "blk.0.ffn_down.weight", "blk.1.ffn_down.weight"
    monkeypatch.setattr(Reading, "data", renamed({one: other, other: one}))

    found = outcome(asked(tiny, root), "long")

    assert isinstance(found, Regression)
    assert found.what == "tokens"


def test_one_block_decoded_with_its_neighbors_scale_is_caught(tiny: Path, root: Path, monkeypatch: Patch) -> None:
    sound = Reading.data

    def data(self: Reading, name: str) -> Any:
        found = sound(self, name)
        if name == "blk.1.ffn_down.weight":
            found = found.copy()
            flat = found.reshape(-1)
            flat[:2] = flat[34:36]
        return found

    monkeypatch.setattr(Reading, "data", data)
    report = asked(tiny, root)

    assert isinstance(outcome(report, "long", check="scored"), Drift)
    assert isinstance(outcome(report, "long"), Drift | Regression)


# -- the text side -----------------------------------------------------------------------------------------------------
def test_a_wrong_bos_is_caught_as_another_prompt(tiny: Path, root: Path, monkeypatch: Patch) -> None:
    sound = Tokenizer._with_bos
    monkeypatch.setattr(Tokenizer, "_with_bos", lambda self, ids: [2, *sound(self, ids)[1:]])

    found = outcome(asked(tiny, root), "long")

    assert isinstance(found, Regression)
    assert (found.what, found.position, found.expected, found.got) == ("prompt ids", 0, 1, 2)


def test_a_template_with_other_whitespace_is_caught_as_another_prompt(
    tiny: Path, root: Path, monkeypatch: Patch
) -> None:
    sound = ChatTemplate.from_metadata

    def spaced(metadata: Any) -> Any:
        source = metadata["tokenizer.chat_template"].replace("assistant\n", "assistant\n ")
        assert source != metadata["tokenizer.chat_template"]
        return sound({**metadata, "tokenizer.chat_template": source})

    monkeypatch.setattr(ChatTemplate, "from_metadata", spaced)
    report = asked(tiny, root)

    found = outcome(report, "chat")
    assert isinstance(found, Regression)
    assert found.what == "prompt ids"
    assert outcome(report, "long") == Identical()


def test_a_stop_string_that_leaks_is_caught_in_the_text(tiny: Path, root: Path, monkeypatch: Patch) -> None:
    sound = StopChecker.push

    def push(self: StopChecker, text: str) -> tuple[str, str | None]:
        passed, stop = sound(self, text)
        return passed + (stop or ""), stop

    monkeypatch.setattr(StopChecker, "push", push)
    report = asked(tiny, root)

    found = outcome(report, "stop")
    assert isinstance(found, Regression)
    assert found.what == "text"
    assert outcome(report, "long") == Identical()


# -- the lifecycle -----------------------------------------------------------------------------------------------------
def test_a_prefix_cache_that_reuses_the_wrong_block_is_caught_by_the_warm_path_alone(
    tiny: Path, root: Path, monkeypatch: Patch
) -> None:
    sound = PrefixCache.match
    # the first block in every other's place (another order of whole blocks would not matter: attention is a sum)
    monkeypatch.setattr(
        PrefixCache, "match", lambda *words: [sound(*words)[0]] * len(found) if (found := sound(*words)) else []
    )
    with opened(tiny) as engine:
        engine.loop.reset_prefix_cache()
        report = verified(engine, root, cases=("long",))

    assert isinstance(outcome(report, "long", "in_process:warm"), Drift | Regression)
    assert outcome(report, "long") == Identical()


def test_a_prefix_cache_that_finds_nothing_is_caught_by_the_warm_path(
    tiny: Path, root: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(PrefixCache, "match", lambda self, request: [])

    found = outcome(asked(tiny, root), "long", "in_process:warm")

    assert isinstance(found, Regression)
    assert found.what == "cache"


def test_a_sampler_that_ignores_its_seed_diverges(tiny: Path, root: Path, monkeypatch: Patch) -> None:
    sound = Sampler.__init__
    monkeypatch.setattr(Sampler, "__init__", lambda self, params, seed, *more: sound(self, params, 0, *more))
    report = asked(tiny, root)

    assert isinstance(outcome(report, "draw"), Diverged)
    assert outcome(report, "long") == Identical()


# -- the served path ---------------------------------------------------------------------------------------------------
def served(tiny: Path, root: Path) -> Report:
    with opened(tiny) as engine:
        return verified_over_http(engine, root)


def test_usage_off_by_one_is_caught(tiny: Path, root: Path, monkeypatch: Patch) -> None:
    sound = Usage.add

    def add(self: Usage, event: FinishEvent, *more: Any) -> None:
        sound(self, replace(event, num_output_tokens=event.num_output_tokens + 1), *more)

    monkeypatch.setattr(Usage, "add", add)

    found = {outcome(served(tiny, root), "chat", path) for path in ("http_chat",)}

    assert {(one.what, one.detail) for one in found if isinstance(one, Regression)} == {
        ("usage", "13 tokens counted, not 12")
    }


def test_a_stream_without_its_last_chunk_of_text_is_caught(tiny: Path, root: Path, monkeypatch: Patch) -> None:
    sound = Reply.piece
    seen: dict[str, int] = {}

    def piece(self: Reply, index: int, event: Any) -> Any:
        found = sound(self, index, event)
        seen[event.request_id] = seen.get(event.request_id, 0) + 1
        if self.body.stream and seen[event.request_id] >= self.body.token_limit:
            found.text = ""
        return found

    monkeypatch.setattr(Reply, "piece", piece)
    report = served(tiny, root)

    found = outcome(report, "long", "http_completions:stream")
    assert isinstance(found, Regression)
    assert found.what == "stream text"
    assert outcome(report, "long", "http_completions") == Identical()


# -- what is no defect -------------------------------------------------------------------------------------------------
def backwards(self: ReferenceOps, x: Any, *projections: Any, norm: Any = None) -> tuple[Any, ...]:
    """`project` with every sum added up from its other end."""
    padded = pad_rows(x if norm is None else self.rms_norm(x, norm)).flip(-1)
    parts = (functional.linear(padded, projection.weight.flip(-1))[: len(x)] for projection in projections)
    return tuple(y if p.bias is None else y + p.bias for y, p in zip(parts, projections, strict=True))


def test_another_order_of_additions_is_identical_or_a_tie(tiny: Path, root: Path, monkeypatch: Patch) -> None:
    with opened(tiny) as engine:
        before = LLM.from_engine(engine).prompt_logits(PROMPT)
    monkeypatch.setattr(ReferenceOps, "project", backwards)
    with opened(tiny) as engine:
        after = LLM.from_engine(engine).prompt_logits(PROMPT)
        report = verified(engine, root)

    assert 0 < np.abs(after - before).max() < 1e-3  # it does change bits
    assert {type(row.outcome) for row in report.rows} <= {Identical, Tie}, words(report)


# -- ties --------------------------------------------------------------------------------------------------------------
@contextmanager
def twins(folder: Path) -> Iterator[tuple[Path, Path, int]]:
    """A checkpoint in which one recorded token has a twin with the very same logit, its goldens, and the twin's id."""
    spec = TinyLlama(seed=4)
    with opened(write_llama(folder / "plain.gguf", spec)) as engine:
        from pocketllm.engine.lifecycle.sampling.params import SamplingParams

        [plain] = LLM.from_engine(engine).generate(PROMPT, SamplingParams(max_tokens=16, **GREEDY))
    used = {*plain.prompt_token_ids, *plain.token_ids}
    chosen = plain.token_ids[5]
    twin = next(one for one in range(chosen + 1, 512) if one not in used)
    head = weights(spec)["output.weight"]
    head[twin] = head[chosen]
    path = write_llama(folder / "twins.gguf", replace(spec, tensors={"output.weight": head}))
    case = {
        "prompt": PROMPT,
        "sampling": {"max_tokens": 16, **GREEDY},
        "paths": ["in_process", "http_completions"],
        "tags": ["tie-probe"],
    }
    with opened(path) as engine:
        record_cases(engine, folder / "goldens", {"twins": case})
    yield path, folder / "goldens", twin


def test_a_tie_that_falls_the_other_way_is_a_tie_through_the_api_and_over_http(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    sound = LlamaModel.logits

    with twins(tmp_path) as (path, root, twin):

        def leaning(self: LlamaModel, hidden: Any) -> Any:
            found = np.array(sound(self, hidden))
            found[:, twin] += 4e-6
            return found

        monkeypatch.setattr(LlamaModel, "logits", leaning)
        with opened(path) as engine:
            reports = [verified(engine, root)]
        with opened(path) as engine:
            reports.append(verified_over_http(engine, root))

    for report in reports:
        [row] = rows(report)
        assert isinstance(row.outcome, Tie), words(report)
        assert row.outcome.positions[0] <= 5
        assert row.observed.token_ids != ()
        assert report.exit_code == 0


def test_a_lean_that_the_record_does_not_explain_is_no_tie(tmp_path: Path, monkeypatch: Patch) -> None:
    sound = LlamaModel.logits

    with twins(tmp_path) as (path, root, twin):

        def leaning(self: LlamaModel, hidden: Any) -> Any:
            found = np.array(sound(self, hidden))
            found[:, twin] += 0.5
            return found

        monkeypatch.setattr(LlamaModel, "logits", leaning)
        with opened(path) as engine:
            report = verified(engine, root)

    assert isinstance(rows(report)[0].outcome, Regression | Drift)
    assert report.exit_code == 1
