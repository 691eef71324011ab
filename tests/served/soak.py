"""A bounded soak: many clients that ask, leave, cancel and err at random, and a server that must not mind.

    python -m tests.served.soak --minutes 30 --clients 16 --model smollm2-135m --out soak.json

Starts `pocketllm serve` in a process of its own and checks that nothing is answered with 5xx but for a cancelled
request, that every answer has exactly one end for each choice, that the cache is empty in the end, and that the
server's memory has not grown since it was warm. Exit code 1 when one of these fails.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

MAX_RSS_GROWTH = 0.02
SAMPLE_S = 1.0
WARM_SAMPLES = 180
"""Until then the first touch of caches and tables makes memory grow, on a busy machine of two cores."""
WORDS = ["the", "capital", "of", "France", "is", "a", "small", "town", "where", "people", "sing", "of", "old", "ships"]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
BAD_BODIES: list[bytes] = [
    b"",
    b"{",
    b"[]",
    b'{"prompt": "\xc4\xe3"}',
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "n": 1000000}',
    b'{"prompt": ""}',
    b'{"prompt": "a", "logprobs": 1000000000}',
    b'{"prompt": "a", "whatever": 1}',
    b'{"prompt": "a", "logit_bias": {"99999999": 1}}',
    b'{"prompt": [-1]}',
    b'{"prompt": "a", "structured_outputs": {"regex": "(abc"}}',
    b'{"prompt": "a", "model": "../../etc/passwd"}',
    json.dumps({"prompt": "word " * 60_000}).encode(),
]


@dataclass
class Outcome:
    """What a soak has seen."""

    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    tokens: int = 0
    faults: list[str] = field(default_factory=list)
    rss_mib: list[float] = field(default_factory=list)
    seconds: float = 0.0
    kv_usage_at_end: float | None = None
    running_at_end: float | None = None

    @property
    def rss_growth(self) -> float:
        """Of the server's memory since it was warm: after a tenth of the time, but three minutes or half of it."""
        tenth = max(len(self.rss_mib) // 10, 1)
        warm = max(tenth, min(WARM_SAMPLES, len(self.rss_mib) // 2))
        early, late = sorted(self.rss_mib[warm : warm + tenth]), sorted(self.rss_mib[-tenth:])
        return late[len(late) // 2] / early[len(early) // 2] - 1 if early and late else 0.0

    def check(self, with_memory: bool = True) -> None:
        """Add what only the end shows to the faults; a soak of seconds says nothing of memory."""
        if self.kv_usage_at_end != 0:
            self.faults.append(f"kv_cache_usage_perc is {self.kv_usage_at_end} with nothing running")
        if self.running_at_end != 0:
            self.faults.append(f"{self.running_at_end} requests run that nobody waits for")
        if with_memory and self.rss_growth > MAX_RSS_GROWTH:
            self.faults.append(f"the server's memory grew by {self.rss_growth:.1%}")

    def as_dict(self) -> dict[str, Any]:
        """JSON-able, with the memory as a few figures."""
        memory = [round(value) for value in self.rss_mib[:: max(len(self.rss_mib) // 20, 1)]]
        counts = {"kinds": dict(self.kinds), "statuses": dict(self.statuses), "num_faults": len(self.faults)}
        told = {"rss_mib": memory, "rss_growth": round(self.rss_growth, 4), "faults": self.faults[:50]}
        return vars(self) | counts | told


class Client:
    """One client: asks one thing after another until the time is over."""

    def __init__(self, url: str, seed: int, outcome: Outcome, context: int) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=120, trust_env=False)
        self._random = random.Random(seed)
        self._outcome = outcome
        self._context = context
        self._name = f"soak-{seed}"
        self._number = 0

    async def run(self, until_s: float) -> None:
        acts: list[tuple[Callable[[], Awaitable[None]], int]] = [
            (self.stream, 8),
            (self.whole, 6),
            (self.leave, 5),
            (self.cancel, 3),
            (self.bad, 4),
            (self.other_address, 2),
        ]
        once = [act for act, _ in acts]  # so that a short soak, too, has done everything
        self._random.shuffle(once)
        async with self._http:
            while once or time.monotonic() < until_s:
                [act] = self._random.choices([act for act, _ in acts], [weight for _, weight in acts])
                act = once.pop() if once else act
                self._number += 1
                self._outcome.kinds[act.__name__] += 1
                try:
                    await act()
                except (httpx.HTTPError, ValueError, KeyError, AssertionError) as error:
                    self._fault(f"{act.__name__}: {type(error).__name__}: {error}")

    def _fault(self, text: str) -> None:
        self._outcome.faults.append(f"{self._name} {self._number} {text}"[:500])

    def _text(self) -> str:
        most = self._context // 3 if self._random.random() < 0.1 else 40
        return " ".join(self._random.choices(WORDS, k=self._random.randint(1, most)))

    def _body(self) -> tuple[str, dict[str, Any]]:
        draw = self._random
        body: dict[str, Any] = {"max_tokens": draw.randint(1, 48), "n": draw.choice([1, 1, 1, 2, 3, 4])}
        body |= draw.choice([{"temperature": 0}, {"temperature": 1.2, "top_p": 0.9}, {"seed": draw.randint(0, 99)}])
        body |= draw.choice(
            [{}, {}, {"stop": ["the", "\n"]}, {"ignore_eos": True}, {"dry_multiplier": 0.8}, {"min_tokens": 1}]
        )
        if draw.random() < 0.15:
            form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
            body |= draw.choice([{"response_format": form}, {"structured_outputs": {"regex": "[a-f]{1,9}"}}])
        if draw.random() < 0.5:
            return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": self._text()}]}
        more = draw.choice([{}, {"logprobs": 2}, {"logprobs": 1, "echo": True}])
        return "/v1/completions", body | {"prompt": self._text()} | more

    def _headers(self) -> dict[str, str]:
        return {"x-request-id": f"{self._name}-{self._number}"}

    # -- what a client does
    async def stream(self) -> None:
        path, body = self._body()
        async with self._http.stream("POST", path, json=body | {"stream": True}, headers=self._headers()) as answer:
            self._outcome.statuses[answer.status_code] += 1
            assert answer.status_code == 200, (await answer.aread())[:300]
            await self._check_stream(answer, body["n"])

    async def _check_stream(self, answer: httpx.Response, n: int, may_be_cancelled: bool = False) -> None:
        ends: Counter[int] = Counter()
        errors, is_done = 0, False
        async for line in answer.aiter_lines():
            if not line:
                continue
            assert not is_done, f"something after [DONE]: {line[:100]}"
            if line == "data: [DONE]":
                is_done = True
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                errors += 1
                assert may_be_cancelled, event
                assert event["error"]["code"] == "cancelled", event
                continue
            for choice in event["choices"]:
                assert choice["index"] not in ends, "a chunk after its choice's end"
                self._outcome.tokens += 1
                if choice["finish_reason"] is not None:
                    ends[choice["index"]] += 1
        assert is_done, "no [DONE]"
        assert errors == 1 or ends == Counter(range(n)), f"ends {dict(ends)} of {n}, {errors} errors"
        assert errors <= 1

    async def whole(self) -> None:
        path, body = self._body()
        answer = await self._http.post(path, json=body, headers=self._headers())
        self._outcome.statuses[answer.status_code] += 1
        assert answer.status_code == 200, answer.text[:300]
        choices = answer.json()["choices"]
        assert [choice["index"] for choice in choices] == list(range(body["n"]))
        assert all(choice["finish_reason"] in ("stop", "length", "tool_calls") for choice in choices)
        self._outcome.tokens += answer.json()["usage"]["completion_tokens"]

    async def leave(self) -> None:
        """Go away in the middle, streamed or not."""
        path, body = self._body()
        body |= {"max_tokens": 64, "ignore_eos": True, "stream": self._random.random() < 0.6}
        task = asyncio.ensure_future(self._read_all(path, body))
        await asyncio.wait([task], timeout=self._random.choice([0.0, 0.01, 0.05, 0.2]))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _read_all(self, path: str, body: dict[str, Any]) -> None:
        # a connection of its own: closing it is how a client leaves
        async with (
            httpx.AsyncClient(base_url=self._http.base_url, timeout=120, trust_env=False) as http,
            http.stream("POST", path, json=body) as answer,
        ):
            async for _ in answer.aiter_bytes():
                pass

    async def cancel(self) -> None:
        path, body = self._body()
        body |= {"max_tokens": 64, "ignore_eos": True, "stream": True}
        headers = self._headers()
        async with self._http.stream("POST", path, json=body, headers=headers) as answer:
            self._outcome.statuses[answer.status_code] += 1
            assert answer.status_code == 200, (await answer.aread())[:300]
            told = await self._http.post(f"/v1/requests/{headers['x-request-id']}/cancel")
            assert told.status_code in (200, 404), told.text
            await self._check_stream(answer, body["n"], may_be_cancelled=True)

    async def bad(self) -> None:
        path = self._random.choice(["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"])
        answer = await self._http.post(path, content=self._random.choice(BAD_BODIES))
        self._outcome.statuses[answer.status_code] += 1
        # /tokenize is right to take what others refuse
        assert answer.status_code in (400, 404, 413) or path == "/tokenize", answer.text[:300]
        assert answer.status_code < 500, answer.text[:300]

    async def other_address(self) -> None:
        draw = self._random
        said = {"role": "user", "content": self._text()}
        path, body = draw.choice(
            [
                ("/v1/responses", {"input": said["content"], "max_output_tokens": 16}),
                ("/v1/messages", {"model": "soaked", "messages": [said], "max_tokens": 16}),
                ("/tokenize", {"messages": [said]}),
                ("/apply-template", {"messages": [said]}),
            ]
        )
        answer = await self._http.post(path, json=body)
        self._outcome.statuses[answer.status_code] += 1
        assert answer.status_code == 200, answer.text[:300]
        assert (await self._http.get("/metrics")).status_code == 200


async def watch(process: psutil.Process, outcome: Outcome, until_s: float) -> None:
    """Sample the server's memory."""
    while time.monotonic() < until_s:
        outcome.rss_mib.append(process.memory_info().rss / 2**20)
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


async def soak(url: str, pid: int, seconds: float, num_clients: int, seed: int, context: int) -> Outcome:
    """Let clients loose on a server for `seconds`."""
    outcome = Outcome()
    begun_s = time.monotonic()
    until_s = begun_s + seconds
    clients = [Client(url, seed * 1000 + number, outcome, context) for number in range(num_clients)]
    await asyncio.gather(watch(psutil.Process(pid), outcome, until_s), *(client.run(until_s) for client in clients))
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


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--kv-cache-mib", type=int, default=96)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    # a small cache is soon written all over: a large one would look like a leak until its last page is touched
    limits = ["--max-model-len", str(given.context), "--kv-cache-bytes", str(given.kv_cache_mib << 20)]
    with tempfile.TemporaryDirectory() as folder:
        errors = Path(folder) / "stderr.txt"
        process, url = start_server(given.model, limits, errors)
        try:
            outcome = asyncio.run(soak(url, process.pid, given.minutes * 60, given.clients, given.seed, given.context))
        finally:
            ended = stop_server(process, errors)
    outcome.faults += ended
    outcome.check()
    text = json.dumps(outcome.as_dict(), indent=2)
    print(text)
    if given.out:
        given.out.write_text(text + "\n", encoding="utf-8")
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main())
