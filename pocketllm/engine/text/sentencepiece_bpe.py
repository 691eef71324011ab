"""The `llama` and `gemma4` kinds: SentencePiece vocabularies, with bytes for what they do not hold.

Kind llama is merged by score; kind gemma4 has a table of merges, and never merges across the end of a run of newlines.
"""

from bisect import bisect_left
from typing import Any

from pocketllm.engine.text.token_scanner import TokenScanner
from pocketllm.engine.text.vocabulary import TokenType, Vocabulary, check_merges
from pocketllm.errors import CheckpointError

SPACE = "\u2581"


class SentencePieceBPE:
    """Encodes plain text to ids; control tokens cannot come out, user-defined ones always match."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        user_defined = vocabulary.texts(TokenType.USER_DEFINED)
        self._user_defined = TokenScanner({text.replace(" ", SPACE): index for text, index in user_defined.items()})
        self._model = _build(vocabulary)

    def encode(self, text: str, *, is_start: bool) -> list[int]:
        """Ids of `text`; where it starts a sequence or follows a control token it gets the space prefix."""
        has_one = self._vocabulary.prepend_scheme is not None and text.startswith((" ", SPACE))
        prefix = SPACE if is_start and self._vocabulary.add_space_prefix and text and not has_one else ""
        ids: list[int] = []
        for piece in self._user_defined.split(prefix + text.replace(" ", SPACE)):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += self._model.encode(piece, add_special_tokens=False).ids
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for: one byte, or its text with the space mark undone."""
        text, kind = self._vocabulary.tokens[token_id], self._vocabulary.types[token_id]
        if kind == TokenType.BYTE:
            return bytes([int(text[3:5], 16)])
        return (text if kind == TokenType.CONTROL else text.replace(SPACE, " ")).encode()


def _build(vocabulary: Vocabulary) -> Any:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    kinds = (TokenType.NORMAL, TokenType.BYTE, TokenType.UNDEFINED)
    ids = {
        token: index
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if token and kind in kinds
    }
    unknown = None
    if (index := vocabulary.ids.get("unknown")) is not None:
        unknown = vocabulary.tokens[index]
        ids[unknown] = index
    missing = [byte for byte in range(256) if f"<0x{byte:02X}>" not in ids]
    if missing and unknown is None:
        raise CheckpointError(
            f"tokenizer.ggml.tokens lacks the byte token <0x{missing[0]:02X}> and there is no unknown token "
            "(tokenizer.ggml.unknown_token_id): some text could not be encoded"
        )
    check_merges(vocabulary.merges, ids)
    merges = vocabulary.merges or _merges(vocabulary)
    try:
        bpe = models.BPE(vocab=ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=not missing)
    except Exception as error:  # tokenizers raises no narrower class
        raise CheckpointError(f"tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {error}") from error
    tokenizer = Tokenizer(bpe)
    if vocabulary.kind == "gemma4":
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("\\n+"), "isolated")
    return tokenizer


def _merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Every pair of normal pieces that makes a normal piece, the highest score of the joined piece first.

    SentencePiece joins the two neighbours whose joined piece scores highest; with one merge for each way to cut a
    piece in two, in the order of scores, a table of merges does the same.
    """
    scores, types, tokens = vocabulary.scores, vocabulary.types, vocabulary.tokens
    normal = [index for index, kind in enumerate(types) if kind == TokenType.NORMAL]
    ranked = [tokens[index] for index in sorted(normal, key=scores.__getitem__, reverse=True)]
    pieces = set(ranked)
    # only cuts at which pieces end: trying every place of a piece as long as the file would take the square of its size
    lengths = set(map(len, pieces))
    ascending = sorted(lengths)
    return [
        (left, right)
        for piece in ranked
        for cut in ascending[: bisect_left(ascending, len(piece))]
        if len(piece) - cut in lengths and (left := piece[:cut]) in pieces and (right := piece[cut:]) in pieces
    ]
