"""What a client may ask about texts without an answer: tokens, their texts, and what the chat template makes."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import model_validator

from pocketllm.engine.serving.apis.messages_body import CountBody
from pocketllm.engine.serving.failures import Failure
from pocketllm.engine.serving.prompts import checked_ids, rendered
from pocketllm.engine.serving.protocol import NULL_IS_EMPTY, ChatBody, Strict, check_extras, validate
from pocketllm.engine.serving.settings import ServedEngine
from pocketllm.engine.text.protection import unprotect

NOT_SERVED = {
    "embeddings": "embeddings",
    "audio": "audio",
    "images": "images",
    "moderations": "moderation",
    "rerank": "reranking",
    "files": "files",
    "batches": "batches",
    "fine_tuning": "fine-tuning",
}
"""First parts of OpenAI's paths after /v1/ that other servers answer, with a word for what they do."""
ALSO_AT_ROOT = ("rerank",)
"""Those that other servers answer without /v1, too."""


class TokenizeText(Strict):
    """POST /tokenize with a text, in vLLM's fields."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def refuse_extras(self) -> "TokenizeText":
        check_extras(self.model_extra or {}, {}, frozenset())
        return self


class TokenizeChat(ChatBody):
    """POST /tokenize with messages, POST /apply-template: what /v1/chat/completions would run."""

    return_token_strs: bool | None = None


class DetokenizeBody(Strict):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[int], NULL_IS_EMPTY]

    @model_validator(mode="after")
    def refuse_extras(self) -> "DetokenizeBody":
        check_extras(self.model_extra or {}, {}, frozenset())
        return self


def tokenize(engine: ServedEngine, document: dict[str, Any]) -> dict[str, Any]:
    """The token ids that the endpoints for a prompt, or for messages, would run. Raises RequestError."""
    if "messages" in document:
        chat = validate(TokenizeChat, document)
        ids, with_texts = engine.tokenizer.encode_rendered(rendered(engine, chat)), chat.return_token_strs
    else:
        body = validate(TokenizeText, document)
        has_special = body.add_special_tokens is not False
        ids, with_texts = engine.tokenizer.encode(body.prompt, add_special=has_special), body.return_token_strs
    texts = [engine.tokenizer.token_text(token_id) for token_id in ids] if with_texts else None
    limit = engine.plan.limits.max_model_len
    return {"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": texts}


def detokenize(engine: ServedEngine, document: dict[str, Any]) -> dict[str, Any]:
    """The text of token ids, control tokens by their names. Raises RequestError."""
    body = validate(DetokenizeBody, document)
    checked_ids(body.tokens, engine.tokenizer, "tokens")
    return {"prompt": engine.tokenizer.decode(body.tokens, skip_special=False)}


def apply_template(engine: ServedEngine, document: dict[str, Any]) -> dict[str, Any]:
    """The prompt of a conversation as a text. Raises RequestError.

    Where a message spells a control token the text looks like that token, but its ids are those of its letters.
    """
    text = rendered(engine, validate(TokenizeChat, document))
    return {"prompt": unprotect(text)}


def count_tokens(engine: ServedEngine, document: dict[str, Any]) -> dict[str, Any]:
    """How many tokens Anthropic's messages would be. Raises RequestError."""
    body = validate(CountBody, document)
    return {"input_tokens": len(engine.tokenizer.encode_rendered(rendered(engine, body.chat())))}


TEXT_ROUTES: Mapping[str, Callable[[ServedEngine, dict[str, Any]], dict[str, Any]]] = {
    "/tokenize": tokenize,
    "/detokenize": detokenize,
    "/apply-template": apply_template,
    "/v1/messages/count_tokens": count_tokens,
}
"""Address → what answers its body."""


def not_served(what: str) -> Failure:
    """501 for what this server will not do, so that a client does not take a missing route for a wrong address."""
    message = f"this server generates text; it does not serve {what}"
    return Failure(501, message, "invalid_request_error", code="not_supported")
