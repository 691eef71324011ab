"""How a request and a server end: `cancel` (a client that leaves frees its blocks), `shutdown` (SIGTERM drains)."""

import time
from dataclasses import replace

from pocketllm.errors import NotJudgedError
from pocketllm.golden.compare import Identical, NotJudged, Outcome, Regression, compare
from pocketllm.golden.entry_points.http import HttpClient
from pocketllm.golden.fixture import Answer, Case
from pocketllm.golden.judging.ties import settle
from pocketllm.golden.judging.words import describe
from pocketllm.golden.served_path import Server

RUNNING = "pocketllm:num_requests_running"
WAITING = "pocketllm:num_requests_waiting"
KV_USAGE = "pocketllm:kv_cache_usage_perc"
GENERATED = "pocketllm:generation_tokens_total"
FREED_WITHIN_S = 3.0
CHUNKS_BEFORE_CANCEL = 3
CANCELLED_MAX_TOKENS = 384


def check_cancel(client: HttpClient, case: Case, answer: Answer) -> Outcome:
    """Disconnect in the middle of a stream: blocks come back within seconds, and the next request is right."""
    try:
        before = _load(client)
        if before[RUNNING] or before[WAITING]:
            return NotJudged("others are using the server: its running count cannot be read as ours")
        during: list[dict[str, float]] = []
        opened = client.abandon(
            case,
            CHUNKS_BEFORE_CANCEL,
            lambda: during.append(_load(client)),
            max_tokens=CANCELLED_MAX_TOKENS,
            ignore_eos=True,
            stop=None,
        )
        if opened.status != 200:
            return NotJudged(f"the request to be cancelled was refused: {opened.error}")
        if not during or not during[0][RUNNING]:
            return NotJudged("the request was over before it could be cancelled")
        problem = _wait_until_freed(client, before)
        if problem:
            return Regression("cancel", problem)
        observed = client.answer(case)
        after = settle(case, answer, observed, compare(case, answer, observed), client.resume)
    except NotJudgedError as error:
        return NotJudged(str(error))
    if isinstance(after, Regression):
        return replace(after, what=f"after a cancelled request, {after.what}")
    return after


def _load(client: HttpClient) -> dict[str, float]:
    values = client.metrics()
    missing = [name for name in (RUNNING, WAITING, KV_USAGE) if name not in values]
    if missing:
        raise NotJudgedError(f"/metrics has no {missing[0]}: an absent series is not a zero")
    return values


def _wait_until_freed(client: HttpClient, before: dict[str, float]) -> str:
    """Poll until nothing runs and the cache is as empty as before; else the sentence of what is still held."""
    deadline = time.monotonic() + FREED_WITHIN_S
    while True:
        now = _load(client)
        if not now[RUNNING] and not now[WAITING] and now[KV_USAGE] <= before[KV_USAGE] + 1e-9:
            break
        if time.monotonic() > deadline:
            return (
                f"{FREED_WITHIN_S:g} s after the client left {now[RUNNING]:g} requests run and "
                f"{now[KV_USAGE]:.1%} of the cache is held"
            )
        time.sleep(0.05)
    generated = now.get(GENERATED, 0.0) - before.get(GENERATED, 0.0)
    if generated >= CANCELLED_MAX_TOKENS:
        return f"all {generated:g} tokens were generated although the client had left after {CHUNKS_BEFORE_CANCEL}"
    return ""


def check_shutdown(server: Server, client: HttpClient, case: Case, answer: Answer, timeout_s: float = 60.0) -> Outcome:
    """SIGTERM after the first token of a stream: the answer still arrives whole, and the server exits with 0."""
    if server.exit_code is not None:
        return NotJudged("the server had ended before it was asked to")
    try:
        drained = client.answer(case, True, on_first=server.terminate)
    except NotJudgedError as error:
        server.wait(timeout_s)
        return Regression("shutdown", f"the request in flight was cut off: {error}")
    outcome = compare(case, answer, drained)
    if not isinstance(outcome, Identical):
        return Regression("shutdown", f"the request in flight was not answered as recorded: {describe(outcome)}")
    code = server.wait(timeout_s)
    if code is None:
        return Regression("shutdown", f"the server still runs {timeout_s:g} s after SIGTERM")
    return outcome if code == 0 else Regression("shutdown", f"the server ended with code {code}, not 0")
