"""Prompts of an exact length in tokens: real text, salted so that no two share a beginning.

The text is Lewis Carroll's *Alice's Adventures in Wonderland* (1865), in the public domain, a paragraph a line. A
prompt begins with a tag that its salt alone decides, goes on at a paragraph that the salt picks, and wraps around.
"""

import hashlib
import random
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files

from pocketllm.bench.scenarios.contract import Planned
from pocketllm.bench.targets.contract import Ask
from pocketllm.errors import OptionError

GENERATOR_VERSION = 2
PROMPTS = "public-domain text (Alice's Adventures in Wonderland), salted per request"
WORDS_PER_TOKEN = 0.9


@cache
def paragraphs() -> tuple[str, ...]:
    """The shipped text."""
    return tuple((files(__package__) / "alice.txt").read_text(encoding="utf-8").splitlines())


def prompt_text(salt: str, words: int) -> str:
    """At least `words` words of text that begins with what the salt alone decides."""
    tag = hashlib.sha256(salt.encode()).hexdigest()[:12]
    book = paragraphs()
    place = random.Random(salt).randrange(len(book))
    parts, count = [f"{tag[:4]} {tag[4:8]} {tag[8:]}."], 3
    while count < words:
        parts.append(book[place % len(book)])
        count += len(parts[-1].split())
        place += 1
    return "\n".join(parts)


Encode = Callable[[str], Sequence[int]]
Decode = Callable[[Sequence[int]], str]


def ask_of(planned: Planned, encode: Encode, decode: Decode) -> Ask:
    """A planned request with its text: the shared prefix, if any, then text of its own."""
    prefix: tuple[int, ...] = ()
    if planned.prefix_salt is not None:
        prefix = text_ids(planned.prefix_salt, planned.n_prefix, encode)
    ids = (*prefix, *text_ids(planned.salt, planned.n_prompt - len(prefix), encode))
    return Ask(planned.salt, ids, decode(ids), planned.n_out, planned.offset_s, planned.json_schema)


def text_ids(salt: str, count: int, encode: Encode) -> tuple[int, ...]:
    """Exactly `count` token ids of salted text; OptionError when the tokenizer cannot make them."""
    words = int(count * WORDS_PER_TOKEN) + 16
    ids = encode(prompt_text(salt, words))
    while len(ids) < count:
        words *= 2
        if words > 100 * count + 10_000:
            raise OptionError(f"the tokenizer makes no {count} tokens of any text: is this a language model?")
        ids = encode(prompt_text(salt, words))
    return tuple(ids[:count])


def ids_sha256(ids: Sequence[int]) -> str:
    """Digest of a token sequence, as records carry it."""
    return hashlib.sha256(b"".join(int(token).to_bytes(4, "little") for token in ids)).hexdigest()
