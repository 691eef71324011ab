"""From a validated body to prompts in token ids and one set of sampling parameters a choice."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from pocketllm.engine.chat_formats.markup import Markup
from pocketllm.engine.lifecycle.sampling.params import SamplingParams
from pocketllm.engine.serving.answers.form import ChatForm, chat_form, template_arguments
from pocketllm.engine.serving.answers.structured import constraint_of
from pocketllm.engine.serving.answers.tools import offered
from pocketllm.engine.serving.protocol import ChatBody, CompletionBody, GenerationBody
from pocketllm.engine.serving.settings import ServedEngine, ServedTokenizer
from pocketllm.engine.structured.constraint import Constraint
from pocketllm.errors import ContextLengthError, RequestError

SEED_RANGE = 2**64
SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "xtc_probability",
    "xtc_threshold",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "bad_words",
    "allowed_token_ids",
    "min_tokens",
    "include_stop_str_in_output",
    "logit_bias",
    "seed",
)
"""Fields that are the engine's own, by the same name; absent or null, the engine's default."""


@dataclass(frozen=True)
class Choice:
    """One answer that is asked for: choice `index` of the reply continues `prompt_token_ids`."""

    index: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    cache_salt: str | None = None
    echo: str | None = None
    """The prompt as a text, where the answer repeats it."""
    form: ChatForm | None = None
    """How the answer is taken apart; None where all of it is text."""
    scored_by: int | None = None
    """The choice that computes the log-probabilities of their prompt, which are this one's too."""


def chat_choices(engine: ServedEngine, body: ChatBody) -> list[Choice]:
    """The choices of a chat body, its messages rendered by the checkpoint's own template. Raises RequestError."""
    text = rendered(engine, body)
    assert engine.chat_template is not None, "it was rendered"
    form = chat_form(body, offered(body), engine.chat_template, text, engine.tokenizer)
    held = Held(form.constraint, form.markup)
    found = choices(engine, body, [engine.tokenizer.encode_rendered(text)], "messages", held)
    return [replace(choice, form=form) for choice in found] if form.is_split else found


def rendered(engine: ServedEngine, body: ChatBody) -> str:
    """A conversation as the template writes it. Raises RequestError, also for what can never fit the context."""
    template = engine.chat_template
    if template is None:
        raise RequestError(
            "this model has no chat template: use /v1/completions", param="messages", code="no_chat_template"
        )
    told = [message.as_dict() for message in body.messages]
    messages, tools = template_arguments(template, told, offered(body))
    arguments = body.template_arguments | tools
    if body.continue_final_message:
        text = template.render_continued(messages, **arguments)
    else:
        has_turn = body.add_generation_prompt is not False
        text = template.render(messages, add_generation_prompt=has_turn, **arguments)
    refuse_hopeless(engine, text, "messages")
    return text


def completion_choices(engine: ServedEngine, body: CompletionBody) -> list[Choice]:
    """The choices of a completions body: n of the first prompt, then n of the second … Raises RequestError."""
    prompts = []
    for number, prompt in enumerate(body.prompt):
        if not prompt:
            raise RequestError(f"prompt {number} is empty: give it a text or token ids", param="prompt")
        if isinstance(prompt, str):
            refuse_hopeless(engine, prompt, "prompt")
            prompts.append(engine.tokenizer.encode(prompt))
        else:
            prompts.append(checked_ids(prompt, engine.tokenizer, "prompt"))
    found = choices(engine, body, prompts, "prompt", Held(constraint_of(body)))
    return [replace(choice, echo=echoed(engine, body, choice)) for choice in found] if body.echo else found


def echoed(engine: ServedEngine, body: CompletionBody, choice: Choice) -> str:
    """The prompt of a choice as it was given, or what its token ids spell; control tokens leave no text."""
    given = body.prompt[choice.index // body.num_choices]
    return given if isinstance(given, str) else engine.tokenizer.decode(given)


def refuse_hopeless(engine: ServedEngine, text: str, param: str) -> None:
    """Raise ContextLengthError for a text that cannot fit, however well its tokens go.

    Encoding megabytes takes seconds, in which nothing else is served; dividing by the longest token takes none.
    """
    limit = engine.plan.limits.max_model_len
    if len(text) <= limit:
        return
    least = -(-len(text.encode("utf-8")) // longest_token(engine.tokenizer))
    if least >= limit:
        raise ContextLengthError(
            f"the prompt has at least {least} tokens, and with an answer it must fit max_model_len={limit}", param=param
        )


@lru_cache(maxsize=8)
def longest_token(tokenizer: ServedTokenizer) -> int:
    """Bytes of the longest token."""
    return max(1, *(len(tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.vocab_size)))


@dataclass(frozen=True)
class Held:
    """What all choices of a body have in common beside its sampling: a grammar, and how the text is marked up."""

    constraint: Constraint | None = None
    markup: Markup | None = None


FREE = Held()


def choices(
    engine: ServedEngine, body: GenerationBody, prompts: Sequence[list[int]], param: str, held: Held
) -> list[Choice]:
    """`n` choices of every prompt; each of the `n` draws from its own seed."""
    found: list[Choice] = []
    if held.constraint is not None:
        engine.loop.compile(held.constraint)  # here, where it may take its time; later it is found compiled
    checked_ids(body.stop_token_ids, engine.tokenizer, "stop_token_ids")
    checked_ids(list(body.logit_bias or ()), engine.tokenizer, "logit_bias")
    of_each = [sampling_params(body, offset, held) for offset in range(body.num_choices)]
    for prompt in prompts:
        if not prompt:
            raise RequestError("the prompt has no tokens", param=param)
        shared = tuple(prompt)
        first = len(found)
        found += [Choice(first + offset, shared, one, body.cache_salt) for offset, one in enumerate(of_each)]
        if body.num_prompt_logprobs is not None:
            found[first + 1 :] = [replace(choice, scored_by=first) for choice in found[first + 1 :]]
    return found


def checked_ids(ids: list[int], tokenizer: ServedTokenizer, param: str) -> list[int]:
    """The same ids; raises RequestError for one outside the vocabulary."""
    size = tokenizer.vocab_size
    if ids and not (min(ids) >= 0 and max(ids) < size):
        raise RequestError(f"{param} has a token id outside the vocabulary of {size} tokens", param=param)
    return ids


def sampling_params(body: GenerationBody, offset: int, held: Held = FREE) -> SamplingParams:
    """Sampling of the choice `offset` of a prompt: all choices alike but for their seeds. Raises RequestError."""
    given = {name: value for name in SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
    first = SamplingParams(
        **given,
        max_tokens=body.token_limit,
        stop=tuple(body.stop),
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=bool(body.ignore_eos),
        logprobs=body.num_logprobs,
        prompt_logprobs=body.num_prompt_logprobs,
        constraint=held.constraint,
        markup=held.markup,
    )
    if not offset or first.seed is None:
        return first
    seed = first.seed + offset
    # the first seed was in range; past the end of 64 bits it starts over, so that every choice stays valid
    values = vars(first) | {"seed": seed if seed < SEED_RANGE else seed - SEED_RANGE}
    return SamplingParams(**values)
