"""How a BPE vocabulary cuts text into words before merging: one entry per value of `tokenizer.ggml.pre`.

An entry is a sequence of regular expressions (Oniguruma); each isolates its matches, what lies between them becomes
words too, and the next expression cuts those further. Source of the patterns: the `tokenizer.json` that the
checkpoints were published with. Characters that are not ASCII are spelled as escapes: some of them change under NFC.
"""

from dataclasses import dataclass

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*|"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+|"
_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_HAN_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_HAN_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_ASCII_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_CASED_LETTERS = (
    "\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)


def _camel(suffix: str, digits: str, line_end: str = r"\r\n/", exclude: str = "") -> str:
    """Words that end where lower case turns to upper case, followed by `suffix`; `digits` is one group of digits."""
    lead, upper, lower = r"[^\r\n\p{L}\p{N}]?", f"[{_UPPER}{exclude}]", f"[{_LOWER}{exclude}]"
    words = f"{lead}{upper}*{lower}+{suffix}|{lead}{upper}+{lower}*{suffix}|"
    return words + digits + rf"| ?[^\s\p{{L}}\p{{N}}]+[{line_end}]*|" + _TAIL


_GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",)
_DIGITS_GPT2 = (r"\p{N}", *_GPT2)
_LLAMA3 = (f"{_CONTRACTION}|{_WORD}" + r"\p{N}{1,3}|" + _PUNCTUATION + _TAIL,)
_QWEN2 = (f"{_CONTRACTION}|{_WORD}" + r"\p{N}|" + _PUNCTUATION + _TAIL,)
_QWEN35 = (_CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _TAIL,)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    _HAN_KANA,
    _ASCII_PUNCTUATION + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _TAIL,
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    r"\s?[A-Za-z" + _CASED_LETTERS + "]+",
    r"\s?[!-/:-~" + "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _HAN_HANGUL,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_HANGUL, r"\p{N}")
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", *_GPT2, r"[0-9][0-9][0-9]")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", *_GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_BLOOM = r" ?[^(\s|.,!?" + "\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_GPT4O = (_camel(_CONTRACTION + "?", r"\p{N}{1,3}"),)
_TEKKEN = (_camel("", r"\p{N}"),)
_KIMI = (r"\p{Han}+|" + _camel(_CONTRACTION + "?", r"\p{N}{1,3}", r"\r\n", r"&&[^\p{Han}]"),)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
)
_SEED_CODER = (f"{_CONTRACTION}|{_WORD}" + r"\p{N}| ?[^\s\p{L}\p{N}\r\n]+|" + _TAIL,)
_MINICPM5 = (r"\p{N}{1,3}", f"{_CONTRACTION}|{_WORD}" + r"\p{N}+|" + _PUNCTUATION + _TAIL)


@dataclass(frozen=True)
class PreTokenizer:
    """`ignore_merges`: a word that is a token is taken whole; `add_bos`: what an absent `add_bos_token` means; `nfc`:
    text is composed first."""

    splits: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


def _table() -> dict[str, PreTokenizer]:
    plain = {
        _DIGITS_GPT2: "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
        _GPT2: "gpt-2 mpt olmo jais phi-2 gigachat a.x-4.0 mellum modern-bert exaone4 trillion granite-docling",
        _LLAMA3: "dbrx smaug-bpe chatglm-bpe",
        _QWEN2: "qwen2 stablelm2 deepseek-r1-qwen kormo f2llmv2 megrez hunyuan solar-open grok-2",
        _QWEN35: "qwen35",
        _DEEPSEEK_V3: "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
        _DEEPSEEK_LLM: "deepseek-llm",
        _DEEPSEEK_CODER: "deepseek-coder",
        _FALCON: "falcon",
        _DEFAULT: "default",
        (_BLOOM,): "poro-chat bloom gpt3-finnish",
        (_BLOOM, r"\p{N}"): "viking",
        _GPT4O: "minimax-m2 kanana2",
        _KIMI: "kimi-k2",
        _BAILING: "bailingmoe bailingmoe2 llada-moe",
        _SEED_CODER: "seed-coder",
    }
    table = {name: PreTokenizer(splits) for splits, names in plain.items() for name in names.split()}
    llama3 = "llama-bpe llama3 llama-v3 llama3-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2"
    for name in llama3.split():
        table[name] = PreTokenizer(_LLAMA3, ignore_merges=True, add_bos=True)
    for name in ("glm4", "glm5"):
        table[name] = PreTokenizer(_LLAMA3, ignore_merges=True)
    for name in ("gpt-4o", "llama4"):
        table[name] = PreTokenizer(_GPT4O, ignore_merges=True)
    table["tekken"] = PreTokenizer(_TEKKEN, ignore_merges=True, add_bos=True)
    table["minicpm5"] = PreTokenizer(_MINICPM5, ignore_merges=True)
    return table


PRE_TOKENIZERS = _table()
