"""Engine options as command-line flags: declared once, shared by every command that loads an engine.

A command lists the flags it takes (`model: Model = None, …`) and hands them to `engine_options`; a flag that was not
given stays None, so that the environment and the project file may answer for it.
"""

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from pocketllm.engine.options import EngineOptions

PANEL = "Engine"

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="Catalog name, .gguf path (any shard of a split), or hf:owner/repo/file.",
        show_default="smollm2-135m",
        rich_help_panel=PANEL,
    ),
]
Backend = Annotated[
    str | None,
    typer.Option(
        "--backend",
        help="Backend by name, or auto.",
        show_default="auto",
        rich_help_panel=PANEL,
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        "--max-model-len",
        help="Longest prompt plus answer, in tokens.",
        show_default="the checkpoint's context",
        rich_help_panel=PANEL,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        help="CPU threads.",
        show_default="the cores this process may use",
        rich_help_panel=PANEL,
    ),
]
ActivationDtype = Annotated[
    str | None,
    typer.Option(
        "--activation-dtype",
        help="What rows are rounded to before a matrix multiplies them: int8, mixed, int16 or float32.",
        show_default="the backend's own; on cpu the narrowest that the model can take",
        rich_help_panel=PANEL,
    ),
]
KVDtype = Annotated[
    str | None,
    typer.Option(
        "--kv-dtype",
        help="What cached keys and values are kept in: float16, bfloat16, fp8_e4m3 (or fp8), int8 or float32.",
        show_default="the backend's own; float16 on cpu and cuda",
        rich_help_panel=PANEL,
    ),
]
BatchInvariant = Annotated[
    bool | None,
    typer.Option(
        "--batch-invariant/--no-batch-invariant",
        help="Give a request the same bits in any company, however its prompt is cut and cached; refused where the "
        "backend cannot.",
        show_default="--no-batch-invariant",
        rich_help_panel=PANEL,
    ),
]
MaxNumSeqs = Annotated[
    int | None,
    typer.Option(
        "--max-num-seqs",
        help="Most requests in one step.",
        show_default="8; 32 on cuda",
        rich_help_panel=PANEL,
    ),
]
MaxNumBatchedTokens = Annotated[
    int | None,
    typer.Option(
        "--max-num-batched-tokens",
        help="Token budget of one step over all requests.",
        show_default="512; 2048 on cuda",
        rich_help_panel=PANEL,
    ),
]
PrefillChunk = Annotated[
    int | None,
    typer.Option(
        "--prefill-chunk",
        help="Most prompt tokens of one request in one step.",
        show_default="256; 2048 on cuda",
        rich_help_panel=PANEL,
    ),
]
BlockSize = Annotated[
    int | None,
    typer.Option(
        "--block-size",
        help="Tokens in one cache block.",
        show_default="16",
        rich_help_panel=PANEL,
    ),
]
KVCacheBytes = Annotated[
    int | None,
    typer.Option(
        "--kv-cache-bytes",
        help="Memory for keys and values.",
        show_default="enough for --max-num-seqs full requests, at most 1 GiB; on cuda a quarter of the GPU",
        rich_help_panel=PANEL,
    ),
]
Watermark = Annotated[
    float | None,
    typer.Option(
        "--watermark",
        help="Share of blocks that admission leaves free.",
        show_default="0.01",
        rich_help_panel=PANEL,
    ),
]
Reserve = Annotated[
    float | None,
    typer.Option(
        "--reserve",
        help="Share of the running requests' possible growth that admission keeps free; below 1 a request may have to "
        "be recomputed.",
        show_default="1",
        rich_help_panel=PANEL,
    ),
]
PrefixCache = Annotated[
    bool | None,
    typer.Option(
        "--prefix-cache/--no-prefix-cache",
        help="Whether a request starts from what an earlier one computed for the same first tokens.",
        show_default="--prefix-cache",
        rich_help_panel=PANEL,
    ),
]
Overlap = Annotated[
    bool | None,
    typer.Option(
        "--overlap/--no-overlap",
        help="Whether a step is launched before the tokens of the one before are known, on a backend where that gains "
        "time.",
        show_default="--overlap",
        rich_help_panel=PANEL,
    ),
]
MaxQueuedRequests = Annotated[
    int | None,
    typer.Option(
        "--max-queued-requests",
        help="Requests that may wait before the queue refuses.",
        show_default="256",
        rich_help_panel=PANEL,
    ),
]

SAMPLING_PANEL = "Sampling, more of it"
"""Of `generate`: the fields of SamplingParams that are rarely needed."""

TypicalP = Annotated[
    float, typer.Option(help="Keep tokens of average surprise, up to this mass.", rich_help_panel=SAMPLING_PANEL)
]
RepetitionPenalty = Annotated[
    float,
    typer.Option(help="Divide logits of tokens of prompt and answer; 1 does nothing.", rich_help_panel=SAMPLING_PANEL),
]
FrequencyPenalty = Annotated[
    float, typer.Option(help="Take off a logit for each time its token was generated.", rich_help_panel=SAMPLING_PANEL)
]
PresencePenalty = Annotated[
    float, typer.Option(help="Take off logits of tokens that were generated.", rich_help_panel=SAMPLING_PANEL)
]
DryMultiplier = Annotated[
    float,
    typer.Option(
        help="Penalize going on with a repetition, growing with its length; 0 is off.", rich_help_panel=SAMPLING_PANEL
    ),
]
XtcProbability = Annotated[
    float,
    typer.Option(
        help="How often all likely tokens but the least likely one are left out.", rich_help_panel=SAMPLING_PANEL
    ),
]
XtcThreshold = Annotated[
    float, typer.Option(help="From where a token is likely to XTC.", rich_help_panel=SAMPLING_PANEL)
]
Mirostat = Annotated[
    int,
    typer.Option(help="2 keeps the surprise near --mirostat-tau, in place of filters.", rich_help_panel=SAMPLING_PANEL),
]
MirostatTau = Annotated[
    float, typer.Option(help="Bits of surprise that mirostat aims at.", rich_help_panel=SAMPLING_PANEL)
]
MinTokens = Annotated[
    int, typer.Option(help="Tokens before which nothing ends the answer.", rich_help_panel=SAMPLING_PANEL)
]
BadWord = Annotated[
    list[str] | None,
    typer.Option(help="Text that the answer does not hold; repeatable.", rich_help_panel=SAMPLING_PANEL),
]


def engine_options(**flags: Any) -> "EngineOptions":
    """EngineOptions from flags by option name (None: not given), then environment, project file and defaults.

    Raises OptionError naming the place of a value that cannot be used.
    """
    from pocketllm.engine.options import resolve_options

    return resolve_options(flags)
