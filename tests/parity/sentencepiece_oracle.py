"""The outside oracle for a SentencePiece vocabulary: sentencepiece itself, over a model made of a GGUF's pieces.

`python -m tests.parity.sentencepiece_oracle` writes the ids that the ordinary tests compare with. Needs the packages
sentencepiece and protobuf.
"""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ORACLES = Path(__file__).parents[1] / "oracles" / "text"

SPACE = "\u2581"
RANGES = (
    (32, 127),
    (0xA0, 0x250),
    (0x370, 0x600),
    (0x900, 0xE00),
    (0x4E00, 0x9FFF),
    (0xAC00, 0xD7A4),
    (0x1F300, 0x1FAFF),
)
AWKWARD = (
    "  ",
    "\n",
    "\n\n\n",
    "\t",
    " ",
    "   ",
    "\r\n",
    "a",
    "The",
    "<b>",
    "</b>",
    "1",
    "23",
    "_",
    SPACE,
    "\u0301",
    "\u200d",
)


def processor(metadata: Mapping[str, Any]) -> Any:
    """A sentencepiece processor with a GGUF's pieces, scores and types."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2 as schema

    def key(name: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{name}", default)

    model = schema.ModelProto()
    for text, score, kind in zip(key("tokens"), key("scores"), key("token_type"), strict=True):
        piece = model.pieces.add()
        # GGUF undoes the space mark of user-defined pieces
        piece.piece = text.replace(" ", SPACE) if kind == 4 else text
        piece.score, piece.type = float(score), int(kind)  # numbered alike
    unknown = key("unknown_token_id")
    model.pieces[unknown].type = 2
    model.trainer_spec.model_type = 2  # byte-pair encoding
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.unk_id, model.trainer_spec.unk_piece = unknown, key("tokens")[unknown]
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = bool(key("add_space_prefix", True))
    model.normalizer_spec.remove_extra_whitespaces = False
    model.normalizer_spec.escape_whitespaces = True
    loaded = sentencepiece.SentencePieceProcessor()
    loaded.LoadFromSerializedProto(model.SerializeToString())
    return loaded


def texts(count: int, seed: int, pieces: list[str]) -> list[str]:
    """Random texts of six kinds: scripts, white space, ASCII, all of Unicode, pieces put together, words."""
    choose = random.Random(seed)

    def one(kind: int) -> str:
        length = choose.randrange(1, 40)
        if kind == 0:
            return "".join(chr(choose.randrange(*choose.choice(RANGES))) for _ in range(length))
        if kind == 1:
            return "".join(choose.choice(AWKWARD) for _ in range(length))
        if kind == 2:
            return "".join(chr(choose.randrange(32, 127)) for _ in range(length))
        if kind == 3:
            points = (choose.randrange(0x110000) for _ in range(length))
            return "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)
        words = [choose.choice(pieces).replace(SPACE, " ") for _ in range(length // 3 + 1)]
        return ("" if kind == 4 else " ").join(words)

    return [one(number % 6) for number in range(count)]


def write_gemma3(folder: Path, count: int = 600) -> None:
    """Gemma 3's vocabulary, which needs its file: only texts and ids are kept."""
    from pocketllm.engine.weights.catalog import resolve_model
    from pocketllm.engine.weights.checkpoint import open_checkpoint

    with open_checkpoint(resolve_model("gemma3-270m", print)) as checkpoint:
        metadata = checkpoint.metadata
        oracle = processor(metadata)
        kinds = metadata["tokenizer.ggml.token_type"]
        pieces = [text for text, kind in zip(metadata["tokenizer.ggml.tokens"], kinds, strict=True) if kind == 1]
    cases = [{"text": text, "ids": oracle.encode(text)} for text in texts(count, 1, pieces)]
    document = {"oracle": "sentencepiece, over the pieces of the file", "note": "ids without BOS", "cases": cases}
    lines = json.dumps(document, ensure_ascii=True, separators=(",", ":")).replace('{"text"', '\n{"text"')
    (folder / "gemma3_270m.json").write_text(lines + "\n")


if __name__ == "__main__":
    write_gemma3(ORACLES)
