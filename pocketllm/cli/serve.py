"""`pocketllm serve`: a model behind the OpenAI HTTP API."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pocketllm.cli import engine_options as flags
from pocketllm.cli.loading import LoadingBar
from pocketllm.cli.output import command, say
from pocketllm.errors import OptionError

if TYPE_CHECKING:
    from pocketllm.engine.serving.settings import ServerSettings

PANEL = "Server"
SECURITY = "Server: who may ask"
WATCHING = "Server: logs and traces"
EPILOG = """\b
Examples:
  pocketllm serve
  pocketllm serve --model ./model.gguf --port 0 --max-num-seqs 16
  pocketllm serve --host 0.0.0.0 --api-key-file keys.txt --tls-cert cert.pem --tls-key key.pem
  pocketllm serve --config serve.toml

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


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make a file's values the defaults of this call. Raises OptionError for a file that cannot be used."""
    if path is None:
        return None
    import tomllib

    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"--config {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"--config {path} is not TOML: {error}") from error
    known = {parameter.name: parameter for parameter in context.command.params}
    known = {name: parameter for name, parameter in known.items() if name not in ("config", "help")}
    named = {name.replace("-", "_"): value for name, value in values.items()}
    for name, value in named.items():
        if name not in known:
            raise OptionError(f"--config {path}: {name!r} is no option of pocketllm serve")
        if isinstance(value, dict):
            raise OptionError(f"--config {path}: {name} is a table; options are written without one")
        if isinstance(value, str) and getattr(known[name], "multiple", False):
            named[name] = value = [value]  # click would say that it cannot be iterated over
        try:
            known[name].process_value(context, value)
        except typer.BadParameter as error:
            raise OptionError(f"--config {path}: {name} cannot be {value!r}: {error.message.rstrip('.')}") from error
    context.default_map = {**(context.default_map or {}), **named}
    return path


def serve(
    config: Annotated[
        Path | None,
        typer.Option(
            help="TOML file of these options, by name; what is said on the command line wins.",
            rich_help_panel=PANEL,
            is_eager=True,
            callback=command(read_config),
        ),
    ] = None,
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
            rich_help_panel=SECURITY,
        ),
    ] = None,
    allow_unauthenticated: Annotated[
        bool,
        typer.Option(
            "--allow-unauthenticated", help="Serve other machines without an API key.", rich_help_panel=SECURITY
        ),
    ] = False,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Host header to accept beside the loopback names; may be repeated.",
            rich_help_panel=SECURITY,
        ),
    ] = None,
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Web page that may ask from a browser, like https://example.org; may be repeated.",
            rich_help_panel=SECURITY,
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="Certificate chain (PEM), to serve https.", rich_help_panel=SECURITY)
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(help="Private key of --tls-cert (PEM).", rich_help_panel=SECURITY)
    ] = None,
    max_body_bytes: Annotated[int, typer.Option(help="Longest body of a request.", rich_help_panel=SECURITY)] = 8
    * 2**20,
    log_level: Annotated[
        str,
        typer.Option(
            help="debug, info, warning or error; info has one line a request, without its texts.",
            rich_help_panel=WATCHING,
        ),
    ] = "warning",
    log_format: Annotated[
        str, typer.Option(help="text, or json: one object a line.", rich_help_panel=WATCHING)
    ] = "text",
    log_file: Annotated[
        Path | None,
        typer.Option(help="Where the log goes.", show_default="standard error", rich_help_panel=WATCHING),
    ] = None,
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(
            help="Address that OpenTelemetry spans are sent to, like http://127.0.0.1:4318/v1/traces; needs the extra "
            "otel.",
            rich_help_panel=WATCHING,
        ),
    ] = None,
    warm_up: Annotated[
        bool,
        typer.Option(
            "--warm-up/--no-warm-up", help="Run the model once before requests are taken.", rich_help_panel=PANEL
        ),
    ] = True,
    max_queued_tokens: Annotated[
        int | None,
        typer.Option(
            help="Prompt tokens that may wait before the queue refuses.",
            show_default="any number",
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
    batch_invariant: flags.BatchInvariant = None,
    max_num_seqs: flags.MaxNumSeqs = None,
    max_num_batched_tokens: flags.MaxNumBatchedTokens = None,
    prefill_chunk: flags.PrefillChunk = None,
    block_size: flags.BlockSize = None,
    kv_cache_bytes: flags.KVCacheBytes = None,
    watermark: flags.Watermark = None,
    reserve: flags.Reserve = None,
    max_queued_requests: flags.MaxQueuedRequests = None,
    prefix_cache: flags.PrefixCache = None,
    overlap: flags.Overlap = None,
) -> None:
    """Serve a model over HTTP, as OpenAI's API (chat, completions, responses) and Anthropic's messages.

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
        batch_invariant=batch_invariant,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        prefill_chunk=prefill_chunk,
        block_size=block_size,
        kv_cache_bytes=kv_cache_bytes,
        watermark=watermark,
        reserve=reserve,
        max_queued_requests=max_queued_requests,
        prefix_cache=prefix_cache,
        overlap=overlap,
    )
    settings = server_settings(
        host=host,
        port=port,
        served_model_names=tuple(served_model_name or ()),
        api_key_file=api_key_file,
        allow_unauthenticated=allow_unauthenticated,
        allowed_hosts=tuple(name.lower() for name in allowed_host or ()),
        allowed_origins=tuple(allowed_origin or ()),
        tls_cert=tls_cert,
        tls_key=tls_key,
        max_body_bytes=max_body_bytes,
        max_queued_tokens=max_queued_tokens,
        otlp_traces_endpoint=otlp_traces_endpoint,
        is_warmed_up=warm_up,
        shutdown_timeout_s=shutdown_timeout,
    )
    set_up_logging(log_level, log_format, log_file)
    raise typer.Exit(run(options, settings))


def set_up_logging(level: str, form: str, path: Path | None) -> None:
    """Raises OptionError."""
    from pocketllm.engine.serving.transport import request_log

    request_log.set_up_logging(level, form, path)


def server_settings(*, api_key_file: Path | None, **values: Any) -> "ServerSettings":
    """ServerSettings with the keys of the file and the environment. Raises OptionError."""
    import os

    from pocketllm.engine.serving.settings import API_KEY_VARIABLE, ServerSettings, read_api_keys
    from pocketllm.engine.serving.watching.tracing import check_tracing

    check_tracing(values["otlp_traces_endpoint"])
    return ServerSettings(**values, api_keys=read_api_keys(api_key_file, os.environ.get(API_KEY_VARIABLE)))


def run(options: Any, settings: "ServerSettings") -> int:
    """Take the port, load, serve; the exit code."""
    from pocketllm.engine.serving.run import Process, bind, url

    taken = bind(settings.host, settings.port)

    def load() -> Any:
        from pocketllm.engine.load import load_engine

        with LoadingBar() as bar:
            engine = load_engine(options, say, bar)
        say(plan_line(engine.plan))
        return engine

    process = Process(taken, settings, load, say)
    say(f"listening on {url(taken, has_tls=settings.tls_cert is not None)}")
    return process.run()


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
