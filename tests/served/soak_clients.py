"""Random clients of a soak, which ask, leave, cancel and err, and what they have seen."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

MAX_RSS_GROWTH = 0.02
TIMEOUT_S = 300.0
"""Sixteen clients with up to four answers each wait for one another on a slow machine."""
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
    """Of the server, once a second, from when its cache was full once: all of it counts."""
    seconds: float = 0.0
    kv_usage_at_end: float | None = None
    running_at_end: float | None = None

    @property
    def rss_growth(self) -> float:
        """From the median of the first tenth of the samples to that of the last; 0 where there are too few."""
        tenth = len(self.rss_mib) // 10
        early, late = sorted(self.rss_mib[:tenth]), sorted(self.rss_mib[-tenth:])
        return late[tenth // 2] / early[tenth // 2] - 1 if tenth else 0.0

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
        memory = [round(value, 1) for value in self.rss_mib[:: max(len(self.rss_mib) // 20, 1)]]
        counts = {"kinds": dict(self.kinds), "statuses": dict(self.statuses), "num_faults": len(self.faults)}
        told = {"rss_mib": memory, "rss_growth": round(self.rss_growth, 4), "faults": self.faults[:50]}
        return vars(self) | counts | told


class Client:
    """One client: asks one thing after another until the time is over."""

    def __init__(self, url: str, seed: int, outcome: Outcome, context: int) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False)
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
        # room for an answer, where a small vocabulary takes three tokens a word
        most = (self._context - 64) // 4 if self._random.random() < 0.1 else 40
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
            httpx.AsyncClient(base_url=self._http.base_url, timeout=TIMEOUT_S, trust_env=False) as http,
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
