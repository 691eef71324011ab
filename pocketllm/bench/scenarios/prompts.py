"""Prompts of an exact length in tokens: English-like text, salted so that no two share a prefix.

The text is generated, not quoted: sentences from a committed word list, the same for the same seed on every machine.
"""

import hashlib
import random
from collections.abc import Callable, Sequence

from pocketllm.bench.scenarios.contract import Planned
from pocketllm.bench.targets.contract import Ask
from pocketllm.errors import OptionError

GENERATOR_VERSION = 1
WORDS_PER_TOKEN = 1.1

WORD_LIST = """
adjective old young quiet heavy bright narrow golden bitter gentle broken hollow early distant wooden silver clever
adjective tired careful empty crowded frozen familiar hungry patient sudden simple strange warm wild winding
noun farmer river market teacher window garden letter sailor mountain village doctor bridge candle winter harbor
noun painter forest kitchen soldier lantern journey baker street valley captain orchard engine library shepherd
noun station mirror weaver island merchant meadow tower hunter blanket printer cellar blacksmith morning compass
noun carpenter ladder message stranger furnace pilot quarry rooster saddle tailor umbrella wagon ferry basket
verb carried followed watched opened repaired painted remembered crossed borrowed described measured gathered
verb forgot admired delivered counted promised lifted searched polished traded answered buried mended visited
adverb slowly often quietly never gladly almost suddenly carefully always twice later again
place beside near under behind beyond across above within toward along against before
joint while because although until since whenever and but so
"""


def words_by_kind() -> dict[str, list[str]]:
    """WORD_LIST as lists by part of speech."""
    found: dict[str, list[str]] = {}
    for line in WORD_LIST.strip().splitlines():
        kind, *words = line.split()
        found.setdefault(kind, []).extend(words)
    return found


WORDS = words_by_kind()


def sentence(rng: random.Random) -> str:
    """One sentence of eleven words, or of two such clauses."""
    text = clause(rng)
    if rng.random() < 0.5:
        text = f"{text} {rng.choice(WORDS['joint'])} {clause(rng)}"
    return text[0].upper() + text[1:] + rng.choice([".", ".", ".", "!", "?"])


def clause(rng: random.Random) -> str:
    """Somebody does something to something somewhere."""
    form = "the adjective noun adverb verb the noun place the adjective noun"
    return " ".join(rng.choice(WORDS[word]) if word in WORDS else word for word in form.split())


def prompt_text(salt: str, words: int) -> str:
    """At least `words` words of text that begins with what the salt alone decides."""
    rng = random.Random(salt)
    tag = hashlib.sha256(salt.encode()).hexdigest()[:12]
    parts = [f"{tag[:4]} {rng.choice(WORDS['noun'])} {tag[4:]}."]
    count = 3
    while count < words:
        parts.append(sentence(rng))
        count += len(parts[-1].split())
    return " ".join(parts)


Encode = Callable[[str], Sequence[int]]
Decode = Callable[[Sequence[int]], str]


def ask_of(planned: Planned, encode: Encode, decode: Decode) -> Ask:
    """A planned request with its text: the shared prefix, if any, then text of its own."""
    prefix: tuple[int, ...] = ()
    if planned.prefix_salt is not None:
        prefix = text_ids(planned.prefix_salt, planned.n_prefix, encode)
    ids = (*prefix, *text_ids(planned.salt, planned.n_prompt - len(prefix), encode))
    return Ask(planned.salt, ids, decode(ids), planned.n_out)


def make_ask(salt: str, n_prompt: int, max_tokens: int, encode: Encode, decode: Decode) -> Ask:
    """A request of exactly n_prompt prompt tokens: a longer text cut by token ids."""
    return ask_of(Planned(salt, n_prompt, max_tokens), encode, decode)


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
