"""A bounded soak: many clients that ask, leave, cancel and err at random, and a server that must not mind.

    python -m tests.served.soak --minutes 30 --clients 16 --model smollm2-135m --keep

Starts `pocketllm serve` in a process of its own and checks that nothing is answered with 5xx but for a cancelled
request, that every answer has exactly one end for each choice, that the cache is empty in the end, and that the
server's memory has not grown since every block of its cache was first written. Leaves a run record of kind `soak`,
which `--keep` also copies to records/soak/ where nothing was wrong. Exit code 1 when one of these fails.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.served.soak_clients import Client, Outcome

SAMPLE_S = 1.0
Tell = Callable[[Mapping[str, Any]], None]
"""Takes a row of the record."""


async def fill(url: str) -> None:
    """Have every block of the cache written, a whole prompt scored and a grammar read, which reads the vocabulary.

    What is taken once and kept would look like a leak.
    """
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as http:
        plan = await plan_of(http)
        draw, length = random.Random(0), plan["max_model_len"] - 8
        for _ in range(plan["num_blocks"] // (length // plan["block_size"]) + 1):
            prompt = [draw.randrange(256) for _ in range(length)]
            (await http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})).raise_for_status()
        for more in ({"logprobs": 5, "echo": True}, {"structured_outputs": {"regex": "[a-f]{1,9}"}}):
            (await http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1, **more})).raise_for_status()


async def plan_of(http: httpx.AsyncClient) -> dict[str, Any]:
    """What a server runs."""
    plan: dict[str, Any] = (await http.get("/v1/models")).json()["data"][0]["plan"]
    return plan


async def watch(process: psutil.Process, outcome: Outcome, until_s: float, tell: Tell) -> None:
    """Sample the server's memory."""
    begun_s = time.monotonic()
    while (now_s := time.monotonic()) < until_s:
        rss = process.memory_info().rss
        outcome.rss_mib.append(rss / 2**20)
        counts = {"n_requests": outcome.kinds.total(), "n_tokens": outcome.tokens, "n_faults": len(outcome.faults)}
        tell({"t_s": now_s - begun_s, "rss": rss} | counts)
        await asyncio.sleep(SAMPLE_S)


async def gauges(url: str) -> tuple[float, float]:
    """(share of the cache in use, requests running or waiting), once nothing has run for a moment or 20 s are over."""
    async with httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as http:
        for _ in range(100):
            lines = (await http.get("/metrics")).text.splitlines()
            values = {
                line.partition("{")[0].removeprefix("pocketllm:"): float(line.split()[-1])
                for line in lines
                if line.startswith("pocketllm:")
            }
            busy = values["num_requests_running"] + values["num_requests_waiting"]
            if not busy and not values["kv_cache_usage_perc"]:
                break
            await asyncio.sleep(0.2)
    return values["kv_cache_usage_perc"], busy


async def soak(
    url: str, pid: int, seconds: float, num_clients: int, seed: int, context: int, tell: Tell = lambda row: None
) -> Outcome:
    """Let clients loose on a server for `seconds`."""
    outcome = Outcome()
    begun_s = time.monotonic()
    until_s = begun_s + seconds
    clients = [Client(url, seed * 1000 + number, outcome, context) for number in range(num_clients)]
    watching = watch(psutil.Process(pid), outcome, until_s, tell)
    await asyncio.gather(watching, *(client.run(until_s) for client in clients))
    outcome.kv_usage_at_end, outcome.running_at_end = await gauges(url)
    outcome.seconds = time.monotonic() - begun_s
    return outcome


def start_server(model: str, options: list[str], errors: Path) -> tuple[subprocess.Popen[bytes], str]:
    """A server on a free port, once it is ready, and its address. errors: a new file for its standard error.

    A file and not a pipe: one that nobody reads fills, and the server waits.
    """
    words = [sys.executable, "-m", "pocketllm", "serve", "--model", model, "--port", "0", "--served-model-name=soaked"]
    with errors.open("wb") as file:
        process = subprocess.Popen([*words, *options], stderr=file)
    while process.poll() is None:
        lines = errors.read_text(encoding="utf-8", errors="replace").splitlines()
        if any(line.startswith("serving ") for line in lines):
            [url] = [line.split()[-1] for line in lines if line.startswith("listening on ")]
            return process, url
        time.sleep(0.05)
    raise SystemExit(f"the server ended with {process.returncode} before it was ready: {tail(errors)}")


def stop_server(process: subprocess.Popen[bytes], errors: Path) -> list[str]:
    """End a server; what is wrong with how it ended."""
    process.terminate()
    code = process.wait()
    is_fine = code == 0 and "Traceback" not in errors.read_text(encoding="utf-8", errors="replace")
    return [] if is_fine else [f"the server ended with {code}: {tail(errors)}"]


def tail(errors: Path) -> str:
    """The end of what a server said."""
    return errors.read_text(encoding="utf-8", errors="replace")[-500:]


def document(given: argparse.Namespace, url: str) -> dict[str, Any]:
    """What the record says of the run before it begins."""
    from pocketllm.engine.weights.catalog import resolve_model
    from pocketllm.engine.weights.checkpoint import open_checkpoint
    from pocketllm.evidence.device_class import device_class
    from pocketllm.golden.subject import model_document

    with open_checkpoint(resolve_model(given.model)) as checkpoint:
        model = model_document(checkpoint)
    plan = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0]["plan"]
    asked = {"clients": given.clients, "seed": given.seed, "minutes": given.minutes}
    return {"device_class": device_class(plan), "model": model, "plan": plan} | asked


def run(given: argparse.Namespace, errors: Path) -> tuple[Outcome, Path]:
    """Start a server, fill its cache, let clients loose, end it; what was seen, and the record of it."""
    from pocketllm.evidence import store

    limits = ["--max-model-len", str(given.context), "--kv-cache-bytes", str(given.kv_cache_mib << 20)]
    process, url = start_server(given.model, limits, errors)
    try:
        asyncio.run(fill(url))
        with store.RecordWriter("soak", document(given, url), store.record_dir(given.record_dir)) as record:
            seconds = given.minutes * 60
            going = soak(url, process.pid, seconds, given.clients, given.seed, given.context, record.append)
            outcome = asyncio.run(going)
            outcome.faults += stop_server(process, errors)
            outcome.check()
            return outcome, record.finish({"outcome": outcome.as_dict()})
    finally:
        if process.poll() is None:
            stop_server(process, errors)


def main(words: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument(
        "--kv-cache-mib", type=int, default=96, help="small, so that a leak is a large part of the whole"
    )
    parser.add_argument("--record-dir", type=Path)
    parser.add_argument("--keep", action="store_true")
    given = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        outcome, path = run(given, Path(folder) / "stderr.txt")
    if given.keep and not outcome.faults:
        from pocketllm.evidence import store

        path = store.keep(path)
    print(json.dumps(outcome.as_dict(), indent=2))
    print(f"record: {path}", file=sys.stderr)
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main())
