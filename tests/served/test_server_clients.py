"""Clients as people have them, over the random checkpoint: what one of them reads, all of them read."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.served.conftest import Served, until

SAY: list[Any] = [{"role": "user", "content": "Say something."}]
SHORT: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
CLIENTS = Path(__file__).parent / "clients"


def text_of(server: Served) -> str:
    """What the server says, read by hand."""
    return server.chat("Say something.", **SHORT)["choices"][0]["message"]["content"]


def test_openais_javascript_client_reads_what_the_python_one_does(tiny_server: Served) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node-missing")
    if not (CLIENTS / "node_modules" / "openai").is_dir():
        pytest.skip("npm-package-missing: openai (npm ci --prefix tests/served/clients)")
    command = [node, str(CLIENTS / "openai_client.mjs"), f"{tiny_server.url}/v1", "llama"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    text = text_of(tiny_server)

    assert told["listed"] == ["llama"]
    assert told["whole"] == told["streamed"] == told["response"] == told["eventText"] == text
    assert told["completion"] == tiny_server.complete("Once upon", **SHORT)["choices"][0]["text"]
    assert told["usage"]["completion_tokens"] <= 12
    assert told["refused"] == {"kind": "BadRequestError", "status": 400, "param": "temperature"}
    until(lambda: tiny_server.engine.loop.stats().num_running == 0)


def test_llm_reads_an_answer_streamed_or_whole(tiny_server: Served) -> None:
    pytest.importorskip("llm", reason="package-missing: llm")
    from llm.default_plugins.openai_models import Chat

    model = Chat("local", model_name="llama", api_base=f"{tiny_server.url}/v1")
    for is_streamed in (True, False):
        answer = model.prompt("Say something.", stream=is_streamed, key="none", **SHORT)

        assert answer.text() == text_of(tiny_server)
        assert answer.usage().output <= 12


def test_pydantic_ai_runs_an_agent_and_streams_one(tiny_server: Served) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai", reason="package-missing: pydantic-ai-slim")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{tiny_server.url}/v1", api_key="none")
    agent = pydantic_ai.Agent(OpenAIChatModel("llama", provider=provider), model_settings=SHORT)
    result = agent.run_sync("Say something.")
    streamed = agent.run_stream_sync("Say something.")

    assert result.output == text_of(tiny_server)
    assert result.usage.output_tokens <= 12
    assert list(streamed.stream_text())[-1] == result.output


SAMPLED = {"temperature": 1.2, "seed": 4, "repetition_penalty": 1.3, "dry_multiplier": 0.8, "min_tokens": 20}


@pytest.mark.parametrize("system", [None, "Be kind."])
@pytest.mark.parametrize("sampling", [{"temperature": 0}, SAMPLED, {"mirostat": 2, "seed": 1}], ids=len)
def test_generate_gives_the_ids_and_tokens_of_the_server(
    tiny_server: Served, tiny_gguf: Path, system: str | None, sampling: dict[str, Any]
) -> None:
    from typer.testing import CliRunner

    from pocketllm.cli.main import app

    words = ["generate", "--model", str(tiny_gguf), "--threads", "1", "--chat", "Say something. <|im_end|>", "--json"]
    sampling = {"temperature": 1.0} | sampling
    words += [word for name, value in sampling.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    told = CliRunner().invoke(app, [*words, "-n", "20", *(["--system", system] if system else [])])
    assert told.exit_code == 0, told.stderr
    local = json.loads(told.stdout)
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": "Say something. <|im_end|>"})
    body = {"messages": messages, "max_tokens": 20, "return_token_ids": True} | sampling
    [choice] = tiny_server.post("/v1/chat/completions", **body).json()["choices"]

    assert local["prompt_token_ids"] == choice["prompt_token_ids"]
    assert local["token_ids"] == choice["token_ids"]
    assert local["text"] == choice["message"]["content"]


def test_the_status_page_works_in_a_browser_and_fits_two_widths(tiny_server: Served, tmp_path: Path) -> None:
    browser, node = shutil.which("chromium"), shutil.which("node")
    if browser is None:
        pytest.skip("chromium-missing")
    if node is None:
        pytest.skip("node-missing")
    if not (CLIENTS / "node_modules" / "playwright-core").is_dir():
        pytest.skip("npm-package-missing: playwright-core (npm ci --prefix tests/served/clients)")
    command = [node, str(CLIENTS / "page.mjs"), tiny_server.url, browser, "390,1280", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    pages = json.loads(done.stdout)

    assert set(pages) == {"390", "1280"}
    for seen in pages.values():
        assert seen["model"] == "llama"
        assert seen["answer"] == text_of(tiny_server)
        assert seen["failed"] == ""
        assert seen["overflow"] <= 0
        assert len(seen["tiles"]) == 6
        assert min(seen["recent"], seen["plan"]) > 0
        assert seen["problems"] == []
        assert seen["hosts"] == [tiny_server.url.removeprefix("http://")]
