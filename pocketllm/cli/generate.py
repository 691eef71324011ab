"""`pocketllm generate`: one prompt in, its continuation out."""

import os
import signal
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pocketllm.cli import engine_options as more
from pocketllm.cli.engine_options import (
    ActivationDtype,
    Backend,
    BatchInvariant,
    KVDtype,
    MaxModelLen,
    Model,
    PrefillChunk,
    Threads,
    engine_options,
)
from pocketllm.cli.loading import LoadingBar, say_fetches
from pocketllm.cli.output import EXIT_BUG, EXIT_INTERRUPTED, command, say, write_json
from pocketllm.errors import OptionError, RequestError

if TYPE_CHECKING:
    from pocketllm.engine.lifecycle.request import Event
    from pocketllm.engine.lifecycle.result import GenerationResult
    from pocketllm.engine.lifecycle.sampling.params import SamplingParams
    from pocketllm.engine.llm import LLM
    from pocketllm.engine.options import EngineOptions
    from pocketllm.engine.structured.constraint import Constraint

DEFAULT_MAX_TOKENS = 128
SLOW_BACKEND = "reference"
PROMPT, SAMPLING, FORM, OUTPUT = "Prompt", "Sampling", "Form", "Output"
EPILOG = (
    'Examples:\n\npocketllm generate "The capital of France is" --max-tokens 8\n\n'
    'pocketllm generate --chat "What is the capital of France?" --json\n\n'
    'pocketllm generate --model model.gguf "Once upon a time"\n\n'
    "pocketllm generate --chat 'Name a color.' --regex 'red|green|blue'\n\n"
    "cat notes.txt | pocketllm generate - --temperature 0.8 --seed 1"
)


def register(app: typer.Typer) -> None:
    """Add this command to the app."""
    app.command("generate", epilog=EPILOG)(generate)


@command
def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="Text to continue; '-', or nothing with piped input, reads standard input, its last line end too."
        ),
    ] = None,
    chat: Annotated[
        str | None,
        typer.Option(
            "--chat", help="Answer this message through the chat template; '-' reads it.", rich_help_panel=PROMPT
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", help="System message before --chat.", rich_help_panel=PROMPT)
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            "-n",
            help="Most tokens to generate.",
            show_default="128, or what the context leaves",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature",
            "-t",
            help="0 takes the likeliest token each time: the same answer every time, so it is the default here.",
            rich_help_panel=SAMPLING,
        ),
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option("--top-p", help="Keep the likeliest tokens up to this mass.", rich_help_panel=SAMPLING)
    ] = 1.0,
    top_k: Annotated[
        int, typer.Option("--top-k", help="Keep this many tokens; 0 keeps all.", rich_help_panel=SAMPLING)
    ] = 0,
    min_p: Annotated[
        float,
        typer.Option("--min-p", help="Keep tokens this likely beside the likeliest.", rich_help_panel=SAMPLING),
    ] = 0.0,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            help="Seed of the draws.",
            show_default="a fresh one, reported by --json",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", help="End at this text, which is left out; repeatable.", rich_help_panel=SAMPLING),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the end token.", rich_help_panel=SAMPLING)
    ] = False,
    typical_p: more.TypicalP = 1.0,
    repetition_penalty: more.RepetitionPenalty = 1.0,
    frequency_penalty: more.FrequencyPenalty = 0.0,
    presence_penalty: more.PresencePenalty = 0.0,
    dry_multiplier: more.DryMultiplier = 0.0,
    xtc_probability: more.XtcProbability = 0.0,
    xtc_threshold: more.XtcThreshold = 0.1,
    mirostat: more.Mirostat = 0,
    mirostat_tau: more.MirostatTau = 5.0,
    min_tokens: more.MinTokens = 0,
    bad_word: more.BadWord = None,
    json_schema: Annotated[
        Path | None,
        typer.Option("--json-schema", help="Hold the answer to this file's JSON schema.", rich_help_panel=FORM),
    ] = None,
    grammar: Annotated[
        Path | None,
        typer.Option("--grammar", help="Hold the answer to this file's grammar, GBNF or Lark.", rich_help_panel=FORM),
    ] = None,
    regex: Annotated[
        str | None,
        typer.Option("--regex", help="Hold the answer to this regular expression.", rich_help_panel=FORM),
    ] = None,
    logprobs: Annotated[
        int | None,
        typer.Option(
            "--logprobs", help="With --json: alternatives to report with each token, 0 to 20.", rich_help_panel=SAMPLING
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document at the end.", rich_help_panel=OUTPUT)
    ] = False,
    no_stream: Annotated[
        bool, typer.Option("--no-stream", help="Print the text when it is complete.", rich_help_panel=OUTPUT)
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Progress and timings on stderr.", rich_help_panel=OUTPUT)
    ] = False,
    model: Model = None,
    backend: Backend = None,
    max_model_len: MaxModelLen = None,
    prefill_chunk: PrefillChunk = None,
    threads: Threads = None,
    activation_dtype: ActivationDtype = None,
    kv_dtype: KVDtype = None,
    batch_invariant: BatchInvariant = None,
) -> None:
    """Continue a prompt, or answer a chat message; text goes to stdout as it comes."""
    from pocketllm.engine.lifecycle.sampling.params import SamplingParams

    text, is_chat = read_prompt(prompt, chat, system)
    if logprobs is not None and not as_json:
        raise OptionError("--logprobs needs --json: plain output has no place for them")
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        typical_p=typical_p,
        repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        dry_multiplier=dry_multiplier,
        xtc_probability=xtc_probability,
        xtc_threshold=xtc_threshold,
        mirostat=mirostat,
        mirostat_tau=mirostat_tau,
        min_tokens=min_tokens,
        bad_words=tuple(bad_word or ()),
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        constraint=read_constraint(json_schema, grammar, regex),
    )
    options = engine_options(
        model=model,
        backend=backend,
        max_model_len=max_model_len,
        prefill_chunk=prefill_chunk,
        threads=threads,
        activation_dtype=activation_dtype,
        kv_dtype=kv_dtype,
        batch_invariant=batch_invariant,
    )
    messages = [{"role": "user", "content": text}] if is_chat else None
    if messages and system is not None:
        messages.insert(0, {"role": "system", "content": system})
    show = not as_json and not no_stream
    run(options, messages or text, params, as_json=as_json, show=show, verbose=verbose or sys.stderr.isatty())


def read_constraint(json_schema: Path | None, grammar: Path | None, regex: str | None) -> "Constraint | None":
    """What the answer is held to. Raises OptionError for a file that cannot be read, RequestError for what it holds."""
    from pocketllm.engine.structured import constraint

    makers = {"--json-schema": constraint.json_schema, "--grammar": constraint.grammar, "--regex": constraint.regex}
    given = dict(zip(makers, (json_schema, grammar, regex), strict=True))
    told = {name: value for name, value in given.items() if value is not None}
    if len(told) > 1:
        raise OptionError(f"give one of {' and '.join(told)}, not both: an answer is held to one thing")
    for name, value in told.items():
        return makers[name](value if isinstance(value, str) else read_file(name, value), name)
    return None


def read_file(option: str, path: Path) -> str:
    """The text of a file that an option names; OptionError where there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise OptionError(f"{option} names a file, and {path} cannot be read: {reason}") from error


def read_prompt(prompt: str | None, chat: str | None, system: str | None) -> tuple[str, bool]:
    """The text to run and whether it is a chat message. Raises OptionError when there is none, or two."""
    if prompt is not None and chat is not None:
        raise OptionError("give either a prompt or --chat, not both")
    if system is not None and chat is None:
        raise OptionError("--system goes with --chat")
    if prompt is not None and prompt.endswith(".gguf") and os.path.isfile(prompt):
        raise OptionError(
            f"the model file {prompt} stands where the prompt goes: say --model {prompt}, then the prompt"
        )
    text = chat if chat is not None else prompt
    if text == "-" or (text is None and not sys.stdin.isatty()):
        try:
            text = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise RequestError(f"standard input is not UTF-8 (byte {error.start})", param="prompt") from error
    if text is None:
        raise OptionError("no prompt: give one as an argument, with --chat, or on standard input")
    if not text:
        raise RequestError("the prompt is empty: give it at least one character", param="prompt")
    return text, chat is not None


def run(
    options: "EngineOptions",
    prompt: str | list[dict[str, str]],
    params: "SamplingParams",
    *,
    as_json: bool,
    show: bool,
    verbose: bool,
) -> None:
    """Load, generate, print; raises typer.Exit when the answer was cut short."""
    from pocketllm.engine.llm import LLM
    from pocketllm.engine.load import load_engine
    from pocketllm.engine.options import AUTO

    with LoadingBar() as bar:
        engine = load_engine(options, say if verbose else say_fetches, bar)
    if not verbose and engine.plan.backend == SLOW_BACKEND and options.backend == AUTO:
        say(f"note: {engine.plan.notes[0]}")  # many times slower than a native backend: never without a word
    with LLM.from_engine(engine) as llm:
        token_ids = llm.chat_token_ids(prompt) if isinstance(prompt, list) else llm.token_ids(prompt)
        if isinstance(prompt, list):
            params = after_thought(llm, prompt, params)
        result = collect(llm, token_ids, with_default_length(params, llm, token_ids), show)
        if as_json:
            write_json(document(llm, result))
        else:
            print("" if show else result.text, flush=True)
        if verbose:
            say(stats_line(result))
    if params.constraint is not None and result.finish_reason == "length":
        tokens = result.usage.completion_tokens
        say(f"note: the answer was cut at {tokens} tokens and may break off in the middle of its form")
    if result.error is not None:
        say(f"error: {result.error}")
        raise typer.Exit(EXIT_BUG)
    if result.finish_reason == "cancelled":
        raise typer.Exit(EXIT_INTERRUPTED)


def after_thought(llm: "LLM", messages: list[dict[str, str]], params: "SamplingParams") -> "SamplingParams":
    """The same, held to its constraint only once the model has thought, where it does; as the server holds it."""
    from pocketllm.engine.serving.answers.form import held_after_thought

    template = llm.engine.chat_template
    if params.constraint is None or template is None:
        return params
    held = held_after_thought(params.constraint, template, template.render(messages), llm.engine.tokenizer)
    return replace(params, constraint=held)


def with_default_length(params: "SamplingParams", llm: "LLM", token_ids: list[int]) -> "SamplingParams":
    """`--max-tokens` when it was not given: DEFAULT_MAX_TOKENS, or what the context leaves."""
    room = llm.engine.plan.limits.max_model_len - len(token_ids)
    if params.max_tokens is not None or room < DEFAULT_MAX_TOKENS:
        return params
    return replace(params, max_tokens=DEFAULT_MAX_TOKENS)


def collect(llm: "LLM", token_ids: list[int], params: "SamplingParams", show: bool) -> "GenerationResult":
    """Run one prompt, printing its text as it comes if `show`. Ctrl-C ends it with what there is, twice at once."""

    pressed: list[int] = []

    def cancel(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, previous)
        pressed.append(number)
        llm.cancel_all()

    def see(event: "Event") -> None:
        if pressed:  # perhaps before the request was there to be cancelled
            llm.cancel_all()
        if show:
            sys.stdout.write(event.text)
            sys.stdout.flush()

    previous = signal.signal(signal.SIGINT, cancel)
    try:
        [result] = llm.generate([token_ids], params, on_event=see)
    finally:
        signal.signal(signal.SIGINT, previous)
    return result


def document(llm: "LLM", result: "GenerationResult") -> dict[str, Any]:
    """The `--json` document."""
    return {
        "model": llm.engine.model_name,
        "prompt_token_ids": result.prompt_token_ids,
        "token_ids": result.token_ids,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "stop_string": result.stop_string,
        "error": result.error,
        "seed": result.seed,
        "usage": result.usage.as_dict(),
        "timings": result.timings.as_dict(),
        "logprobs": None if result.logprobs is None else [asdict(entry) for entry in result.logprobs],
        "plan": llm.engine.plan.as_dict(),
    }


def stats_line(result: "GenerationResult") -> str:
    """Counts and rates of one answer, prefill and decode apart."""
    times, usage = result.timings, result.usage
    parts = [f"load {times.load_s:.2f} s"]
    if times.prefill_s:
        rate = usage.prompt_tokens / times.prefill_s
        parts.append(f"prefill {usage.prompt_tokens} tokens in {times.prefill_s:.2f} s ({rate:.1f} tok/s)")
    if times.decode_s:
        count = usage.completion_tokens - 1  # the first token belongs to prefill
        parts.append(f"decode {count} tokens in {times.decode_s:.2f} s ({count / times.decode_s:.1f} tok/s)")
    return " · ".join([*parts, result.finish_reason])
