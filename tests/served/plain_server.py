"""A small OpenAI-compatible server as a program, for arms that are started by command line: `python plain_server.py`.

Standard library only, so that it starts in a moment. It answers one token a chunk and says what it was started with.
"""

import argparse
import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--name", default="plain")
    parser.add_argument("--echo", help="taken and ignored")
    parser.add_argument("--token-s", type=float, default=0.0)
    parser.add_argument("--dies", action="store_true", help="end before it is ready")
    parser.add_argument("--never-ready", action="store_true")
    parser.add_argument("--ignores-sigterm", action="store_true")
    return parser.parse_args()


def main() -> None:
    told = options()
    print("weights are where they should be", "API key set" if os.environ.get("POCKETLLM_API_KEY") else "no key")
    if told.dies:
        print("CUDA out of memory")
        sys.exit(7)
    if told.ignores_sigterm:
        import signal

        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            ready = not told.never_ready
            models = {"data": [{"id": told.name, "object": "model", "created": int(time.time()), "owned_by": "me"}]}
            self.reply(200 if ready else 503, [json.dumps(models).encode()])

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self.reply(200, stream(body), told.token_s)

        def reply(self, status: int, pieces: list[bytes], pause_s: float = 0.0) -> None:
            self.send_response(status)
            self.send_header("content-length", str(sum(map(len, pieces))))
            self.end_headers()
            for piece in pieces:
                time.sleep(pause_s)
                self.wfile.write(piece)
                self.wfile.flush()

        def log_message(self, *args: Any) -> None:
            pass

    ThreadingHTTPServer(("127.0.0.1", told.port), Handler).serve_forever()


def stream(body: dict[str, Any]) -> list[bytes]:
    """One chunk a token, then the bill."""
    count = body["max_tokens"]
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
    usage["prompt_tokens_details"] = {"cached_tokens": 0}
    chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "text": "x", "finish_reason": None}]}] * (count - 1)
    last = {"choices": [{"index": 0, "text": "x", "finish_reason": "length"}]}
    return [f"data: {json.dumps(event)}\n\n".encode() for event in [*chunks, last, {"choices": [], "usage": usage}]]


if __name__ == "__main__":
    main()
