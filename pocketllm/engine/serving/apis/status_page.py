"""The page at `/` and the figures behind it: what runs, how fast, and what was asked lately, without its texts."""

import re
import time
from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from starlette.responses import Response

from pocketllm.engine.serving.server import Server


@cache
def page() -> tuple[bytes, str]:
    """The page and the policy that lets it run its own script and style, and nothing from anywhere else."""
    text = (Path(__file__).parent / "status.html").read_text(encoding="utf-8")

    def hashed(tag: str) -> str:
        [inside] = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        return f"'sha256-{b64encode(sha256(inside.encode()).digest()).decode()}'"

    rules = [
        "default-src 'none'",
        f"script-src {hashed('script')}",
        f"style-src {hashed('style')}",
        "img-src data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    return text.encode(), "; ".join(rules)


def page_response() -> Response:
    """The page as an answer."""
    content, policy = page()
    headers = {"content-security-policy": policy, "x-content-type-options": "nosniff", "cache-control": "no-store"}
    return Response(content, headers=headers, media_type="text/html")


def status_document(server: Server) -> dict[str, Any]:
    """What the page shows; `plan` and `stats` are null while the model loads."""
    engine = server.engine
    return {
        "version": version("pocketllm"),
        "models": list(server.names),
        "phase": server.phase.value,
        "uptime_s": time.time() - server.started_s,
        "plan": None if engine is None else engine.plan.as_dict(),
        "stats": None if engine is None else stats_document(engine.loop.stats()),
        "recent": [summary.as_dict() for summary in server.recent],
    }


def stats_document(stats: Any) -> dict[str, Any]:
    """Gauges of now, and counters from which a reader makes rates."""
    queried, hits = stats.num_prefix_queried_tokens, stats.num_prefix_hit_tokens
    return {
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "kv_usage": stats.kv_usage,
        "prompt_tokens": stats.num_prompt_tokens,
        "generation_tokens": stats.num_generation_tokens,
        "prefix_hit_share": None if queried is None else hits / max(queried, 1),
    }
