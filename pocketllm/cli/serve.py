"""`pocketllm serve`: a model behind the OpenAI HTTP API."""

from pathlib import Path
from typing import Annotated, Any

import typer

from pocketllm.cli import engine_options as flags
from pocketllm.cli.loading import LoadingBar
from pocketllm.cli.output import command, say

PANEL = "Server"
EPILOG = """\b
Examples:
  pocketllm serve
  pocketllm serve --model ./model.gguf --port 0 --max-num-seqs 16
  pocketllm serve --host 0.0.0.0 --api-key-file keys.txt

\b
Then, from a shell:
  curl http://127.0.0.1:8000/v1/completions \\
    -H 'Content-Type: application/json' \\
    -d '{"prompt": "The capital of France is", "max_tokens": 8}'

\b
Or from Python, with the openai package:
  client = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="-")
  client.completions.create(model="smollm2-135m", prompt="Once upon")
"""


def serve(
    model: flags.Model = None,
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=PANEL)] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes any free one and prints it.", rich_help_panel=PANEL)] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="Name the model answers to; may be repeated. Otherwise the model's own.", rich_help_panel=PANEL
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File with API keys, one a line; $POCKETLLM_API_KEY adds more. Asked for on every route but /health "
            "and /ready.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    allow_unauthenticated: Annotated[
        bool,
        typer.Option("--allow-unauthenticated", help="Serve other machines without an API key.", rich_help_panel=PANEL),
    ] = False,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Host header to accept beside the loopback names; may be repeated.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    shutdown_timeout: Annotated[
        float,
        typer.Option(help="Seconds that running requests get to finish at the first signal.", rich_help_panel=PANEL),
    ] = 30.0,
    backend: flags.Backend = None,
    max_model_len: flags.MaxModelLen = None,
    threads: flags.Threads = None,
    activation_dtype: flags.ActivationDtype = None,
    kv_dtype: flags.KVDtype = None,
    max_num_seqs: flags.MaxNumSeqs = None,
    max_num_batched_tokens: flags.MaxNumBatchedTokens = None,
    prefill_chunk: flags.PrefillChunk = None,
    block_size: flags.BlockSize = None,
    kv_cache_bytes: flags.KVCacheBytes = None,
    watermark: flags.Watermark = None,
    reserve: flags.Reserve = None,
    max_queued_requests: flags.MaxQueuedRequests = None,
    prefix_cache: flags.PrefixCache = None,
) -> None:
    """Serve a model over HTTP: /v1/chat/completions, /v1/completions, /v1/models, /health, /ready, /metrics.

    The port is taken first and /health answers while the model loads; /ready says when it has.
    Ctrl-C or SIGTERM lets running requests finish; once more ends at once.
    """
    options = flags.engine_options(
        model=model,
        backend=backend,
        max_model_len=max_model_len,
        threads=threads,
        activation_dtype=activation_dtype,
        kv_dtype=kv_dtype,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        prefill_chunk=prefill_chunk,
        block_size=block_size,
        kv_cache_bytes=kv_cache_bytes,
        watermark=watermark,
        reserve=reserve,
        max_queued_requests=max_queued_requests,
        prefix_cache=prefix_cache,
    )
    settings = server_settings(
        host=host,
        port=port,
        served_model_names=tuple(served_model_name or ()),
        api_key_file=api_key_file,
        allow_unauthenticated=allow_unauthenticated,
        allowed_hosts=tuple(name.lower() for name in allowed_host or ()),
        shutdown_timeout_s=shutdown_timeout,
    )
    raise typer.Exit(run(options, settings))


def server_settings(*, api_key_file: Path | None, **values: Any) -> Any:
    """ServerSettings with the keys of the file and the environment. Raises OptionError."""
    import os

    from pocketllm.engine.serving.settings import API_KEY_VARIABLE, ServerSettings, read_api_keys

    return ServerSettings(**values, api_keys=read_api_keys(api_key_file, os.environ.get(API_KEY_VARIABLE)))


def run(options: Any, settings: Any) -> int:
    """Take the port, load, serve; the exit code."""
    import logging

    from pocketllm.engine.serving.run import Process, bind, url

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    taken = bind(settings.host, settings.port)
    say(f"listening on {url(taken)}")

    def load() -> Any:
        from pocketllm.engine.load import load_engine

        with LoadingBar() as bar:
            engine = load_engine(options, say, bar)
        say(plan_line(engine.plan))
        return engine

    return Process(taken, settings, load, say).run()


def plan_line(plan: Any) -> str:
    """What runs, in one line."""
    limits = plan.limits
    return (
        f"plan: {plan.architecture} on {plan.backend} ({plan.device_name}), context {limits.max_model_len} tokens, "
        f"{limits.max_num_seqs} requests a step, {limits.num_blocks} cache blocks of {limits.block_size} tokens"
    )


def register(app: typer.Typer) -> None:
    """Add this command to the app."""
    app.command(epilog=EPILOG)(command(serve))
