"""Hugging Face directories against transformers, which writes them here: the same logits, and the same ids of text."""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pocketllm import LLM, SamplingParams
from pocketllm.engine.text.tokenizer import Tokenizer
from pocketllm.engine.weights.checkpoint import Checkpoint, open_checkpoint
from pocketllm.errors import PocketLLMError
from tests.parity.drive import Driver, chunks, nmse

torch = pytest.importorskip("torch", reason="missing-extra: oracle (torch)")
transformers = pytest.importorskip("transformers", reason="missing-extra: oracle (transformers)")
pytestmark = pytest.mark.oracle

TOLERANCE = 1e-9
ALICE = (Path(__file__).parent / "alice.txt").read_text(encoding="utf-8")
FUZZ = np.load(Path(__file__).parents[1] / "oracles" / "text" / "pre_fuzz.npz")
STRINGS = bytes(FUZZ["strings"]).decode().split("\0")
VOCAB = 384
DENSE: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 24}
OF_OLMO_3 = {
    "full_attention": {**YARN, "attention_factor": 1.3},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
WITHOUT_HEAD_DIM = {name: value for name, value in DENSE.items() if name != "head_dim"}
MODELS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("Llama", DENSE),
    "llama3": ("Llama", {**DENSE, "rope_parameters": LLAMA3, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", WITHOUT_HEAD_DIM),
    "qwen3": ("Qwen3", {**DENSE, "rope_parameters": YARN}),
    "gemma3": ("Gemma3", {**DENSE, "num_hidden_layers": 7, "query_pre_attn_scalar": 24, "sliding_window": 8}),
    "qwen35": ("Qwen3_5", {**DENSE, "num_hidden_layers": 4, "head_dim": 32, **DELTA}),
    "mistral": ("Mistral", {**DENSE, "sliding_window": None}),
    "mistral_window": ("Mistral", {**DENSE, "sliding_window": 7}),
    "llama_yarn_factor": ("Llama", {**DENSE, "rope_parameters": {**YARN, "attention_factor": 0.7}}),
    "llama_yarn_quotient": ("Llama", {**DENSE, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.4}}),
    "qwen3_biases": ("Qwen3", {**DENSE, "attention_bias": True}),
    "gemma2_scale": ("Gemma2", {**DENSE, "query_pre_attn_scalar": 5, "sliding_window": 8}),
    "gemma3_scale_cap": (
        "Gemma3",
        {**DENSE, "query_pre_attn_scalar": 256, "sliding_window": 8, "final_logit_softcapping": 2.0},
    ),
    "smollm3": ("SmolLM3", {**WITHOUT_HEAD_DIM, "num_hidden_layers": 5}),
    "olmo2": ("Olmo2", WITHOUT_HEAD_DIM),
    "olmo3": (
        "Olmo3",
        {**WITHOUT_HEAD_DIM, "num_hidden_layers": 5, "sliding_window": 8, "rope_parameters": OF_OLMO_3},
    ),
    "gemma2": ("Gemma2", {**DENSE, "query_pre_attn_scalar": 24, "sliding_window": 8}),
    "qwen3moe": ("Qwen3Moe", {**DENSE, **EXPERTS, "norm_topk_prob": True}),
    "qwen3moe_biases": ("Qwen3Moe", {**DENSE, **EXPERTS, "norm_topk_prob": False, "attention_bias": True}),
    "qwen35moe": (
        "Qwen3_5Moe",
        {**DENSE, "head_dim": 32, **DELTA, **EXPERTS, "num_hidden_layers": 4, "shared_expert_intermediate_size": 48},
    ),
    "gpt_oss": (
        "GptOss",
        {**DENSE, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 8}
        | {"rope_parameters": {**YARN, "truncate": False}},
    ),
}
OF_16 = ("llama3", "gemma3", "qwen35", "gpt_oss")
"""Models whose rules move elements or compute, tried in other types too."""
PACKED = {**DENSE, "hidden_size": 192, "intermediate_size": 320, "head_dim": 64, "num_hidden_layers": 2}
"""Sizes that tiles of 128 do not fill, in rows that are blocks of 64."""
SIZED_FOR_BLOCKS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "packed": ("Llama", PACKED),
    "packed_experts": ("Qwen3Moe", {**PACKED, **EXPERTS, "moe_intermediate_size": 64}),
    "packed_qwen2": ("Qwen2", {**WITHOUT_HEAD_DIM, "hidden_size": 256, "intermediate_size": 320}),
    "packed_qwen3": ("Qwen3", PACKED),
    "packed_gemma3": ("Gemma3", {**PACKED, "query_pre_attn_scalar": 64, "sliding_window": 8}),
    "packed_qwen35": (
        "Qwen3_5",
        {**PACKED, **DELTA, "num_hidden_layers": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
    ),
}
TEXT_OF = {"gemma3": "gemma3_text", "qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text"}
"""`model_type` of the text part of models that see images."""
CONFIGS = {name: f"{name}TextConfig" for name in ("Gemma3", "Qwen3_5", "Qwen3_5Moe")}


def tiny_model(name: str, dtype: Any) -> Any:
    """A random model of transformers whose every tensor matters."""
    kind, arguments = (MODELS | SIZED_FOR_BLOCKS)[name]
    config = getattr(transformers, CONFIGS.get(kind, f"{kind}Config"))(**arguments, attn_implementation="eager")
    torch.manual_seed(len(name))
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.15 if parameter.ndim > 1 else 0.1
            base = 0 if parameter.ndim > 1 else parameter
            parameter.copy_(base + spread * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype).eval()


def byte_level_tokenizer() -> Any:
    """Byte-level BPE as Qwen's, trained on a page: composed text, words by a pattern, two control tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    pattern += r"\s*[\r\n]+|\s+(?!\S)|\s+"
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|begin|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 4, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([ALICE], trainer)
    return tokenizer


def pieces_tokenizer() -> Any:
    """Pieces with bytes for what they lack, as Gemma's: spaces become marks, and BOS comes first."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    special = ["<bos>", "<eos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([ALICE], trainer)
    made = json.loads(tokenizer.to_str())
    made["added_tokens"] = made["added_tokens"][:3]  # bytes are pieces of the model, not added tokens
    tokenizer = Tokenizer.from_str(json.dumps(made))
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return tokenizer


def write_directory(folder: Path, name: str, dtype: Any, shard_size: str = "1GB") -> tuple[Path, Any]:
    """A directory as transformers saves it, with a tokenizer; gives its model in float32 too."""
    model = tiny_model(name, dtype)
    model.save_pretrained(folder, max_shard_size=shard_size)
    tokenizer = pieces_tokenizer() if name == "gemma3" else byte_level_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    settings = {"chat_template": template, "eos_token": tokenizer.id_to_token(1)}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder, type(model).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def with_images(name: str) -> Any:
    """A random model that sees images too, its text part one of those above."""
    kind, arguments = MODELS[name]
    if kind == "Gemma3":
        eyes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "image_size": 28}
        eyes |= {"num_attention_heads": 2, "patch_size": 14, "model_type": "siglip_vision_model"}
    else:
        eyes = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    text = {**arguments, "model_type": TEXT_OF[name]}
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=eyes, attn_implementation="eager")
    torch.manual_seed(6)
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()


@pytest.mark.parametrize("name", TEXT_OF)
def test_the_text_part_of_a_model_that_sees_images_agrees_with_transformers(name: str, tmp_path: Path) -> None:
    model = with_images(name)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    ids = random.Random(9).choices(range(VOCAB), k=20)
    [got] = Driver(tmp_path).run([ids], chunks(len(ids), 7))

    assert "text_config" in config
    assert nmse(got, logits_of(model, ids)) <= TOLERANCE


def logits_of(model: Any, ids: list[int]) -> np.ndarray[Any, Any]:
    with torch.inference_mode():
        values: np.ndarray[Any, Any] = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].numpy()
    return values


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "bfloat16") for name in MODELS), *((name, "float16") for name in OF_16), ("llama3", "float32")],
)
def test_logits_of_a_directory_agree_with_transformers(name: str, dtype: str, tmp_path: Path) -> None:
    folder, model = write_directory(tmp_path / name, name, getattr(torch, dtype))
    ids = random.Random(7).choices(range(VOCAB), k=48)
    driver = Driver(folder)

    for size in (48, 7, 1):
        driver.reset()
        [got] = driver.run([ids], chunks(len(ids), size))
        assert nmse(got, logits_of(model, ids)) <= TOLERANCE


@pytest.mark.parametrize("name", ["qwen3moe", "qwen35moe"])
def test_experts_that_lie_together_are_those_that_lie_one_by_one(name: str, tmp_path: Path) -> None:
    model = tiny_model(name, torch.bfloat16)
    model.save_pretrained(tmp_path / "together", save_original_format=False)
    model.save_pretrained(tmp_path / "apart")
    assert b"mlp.experts.gate_up_proj" in (tmp_path / "together" / "model.safetensors").read_bytes()
    with open_checkpoint(tmp_path / "together") as together, open_checkpoint(tmp_path / "apart") as apart:
        for part in ("gate", "up", "down"):
            tensor = f"blk.1.ffn_{part}_exps.weight"
            assert together.tensor(tensor).shape == apart.tensor(tensor).shape
            assert together.data(tensor).tobytes() == apart.data(tensor).tobytes()


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_ids_of_a_thousand_random_strings_are_those_of_the_tokenizers_library(name: str, tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Oracle

    folder, _ = write_directory(tmp_path / name, name, torch.bfloat16)
    oracle = Oracle.from_file(str(folder / "tokenizer.json"))
    with open_checkpoint(folder) as checkpoint:
        tokenizer = Tokenizer.from_metadata(checkpoint.metadata)

    for text in [*STRINGS, *ALICE.split("\n"), "e\u0301 \u1100\u1161"]:
        expected = oracle.encode(text).ids
        assert tokenizer.encode(text) == expected, text


@pytest.mark.parametrize("name", ["llama", "mistral_window", "gemma3", "gemma3_scale_cap", "qwen35", "gpt_oss"])
def test_a_directory_generates_what_transformers_generates(name: str, tmp_path: Path) -> None:
    folder, model = write_directory(tmp_path / name, name, torch.bfloat16)
    ids = random.Random(8).choices(range(2, 380), k=20)
    expected = list(ids)
    for _ in range(8):
        expected.append(int(logits_of(model, expected)[-1].argmax()))
    with LLM(str(folder), backend="reference") as llm:
        [result] = llm.generate([ids], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))

    assert list(result.token_ids) == expected[20:]


def test_shards_of_a_split_directory_are_one_checkpoint(tmp_path: Path) -> None:
    folder, model = write_directory(tmp_path / "split", "llama", torch.bfloat16, shard_size="60KB")
    ids = list(range(40, 60))
    driver = Driver(folder)
    [got] = driver.run([ids], chunks(len(ids), 20))

    assert len(list(folder.glob("*.safetensors"))) > 1
    assert len(driver.checkpoint.files) == len(list(folder.glob("*.safetensors"))) + 4
    assert nmse(got, logits_of(model, ids)) <= TOLERANCE


def test_raw_bytes_are_those_that_the_safetensors_library_reads(tmp_path: Path) -> None:
    safe_open = pytest.importorskip("safetensors", reason="missing-extra: oracle (safetensors)").safe_open
    folder, _ = write_directory(tmp_path / "qwen3", "qwen3", torch.bfloat16)
    with open_checkpoint(folder) as checkpoint, safe_open(folder / "model.safetensors", "pt") as oracle:
        theirs = oracle.get_tensor("model.layers.1.mlp.down_proj.weight")

        assert checkpoint.tensor("blk.1.ffn_down.weight").quant_type == "BF16"
        assert checkpoint.data("blk.1.ffn_down.weight").tobytes() == theirs.view(torch.uint8).numpy().tobytes()


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_directory(tmp_path_factory.mktemp("hf") / "tiny", "qwen3", torch.bfloat16, shard_size="60KB")[0]


def changed_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def remove_shard(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[1].unlink()


def cut_shard(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])


def other_dtype(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes().replace(b'"BF16"', b'"I16" ', 1))


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()


DAMAGE: Mapping[str, tuple[Any, str]] = {
    "a missing shard": (remove_shard, "is missing: fetch it too"),
    "a cut shard": (cut_shard, "was cut or damaged"),
    "another element type": (other_dtype, "element type I16; this version reads F32, F16, BF16"),
    "no weights": (no_weights, "neither model.safetensors nor"),
    "another architecture": (
        lambda at: changed_config(at, model_type="mamba2"),
        "model_type 'mamba2'; safetensors are",
    ),
    "quantised": (lambda at: changed_config(at, quantization_config={}), "quantization_config"),
    "no layers": (lambda at: changed_config(at, num_hidden_layers=0), "num_hidden_layers is 0"),
    "half a pair": (lambda at: changed_config(at, head_dim=17), "heads have 17 values"),
    "layers without end": (lambda at: changed_config(at, num_hidden_layers=10**12), "at most 512 can be read"),
    "a rope that is not known": (
        lambda at: changed_config(at, rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}),
        "rope_type 'longrope' is not known",
    ),
    "another gate": (lambda at: changed_config(at, hidden_act="relu"), "hidden_act is 'relu'"),
    "config.json that is no JSON": (lambda at: (at / "config.json").write_text("{"), "config.json cannot be read"),
    "more layers than tensors": (lambda at: changed_config(at, num_hidden_layers=4), "missing tensors: blk.3."),
    "other heads": (lambda at: changed_config(at, num_key_value_heads=1), "blk.0.attn_k.weight has shape (48, 64)"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_directory_that_cannot_run_is_refused_in_a_sentence(damage: str, split: Path, tmp_path: Path) -> None:
    import shutil

    break_it, sentence = DAMAGE[damage]
    shutil.copytree(split, tmp_path / "tiny")
    break_it(tmp_path / "tiny")

    with pytest.raises(PocketLLMError) as caught:
        LLM(str(tmp_path / "tiny"), backend="reference")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value).strip() or "cannot run" in str(caught.value)


def test_inspect_reports_a_directory_as_it_reports_a_file(split: Path) -> None:
    from typer.testing import CliRunner

    from pocketllm.cli.main import app

    result = CliRunner().invoke(app, ["inspect", str(split)])

    assert result.exit_code == 0, result.output
    assert "Hugging Face directory" in result.output
    assert "qwen3" in result.output


def test_a_checkpoint_of_a_directory_has_the_digest_of_its_files(split: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(split, tmp_path / "tiny")
    with open_checkpoint(split) as one, open_checkpoint(tmp_path / "tiny") as same:
        assert one.sha256() == same.sha256()
    changed_config(tmp_path / "tiny", rms_norm_eps=1e-5)
    with open_checkpoint(split) as one, open_checkpoint(tmp_path / "tiny") as other:
        assert isinstance(other, Checkpoint)
        assert one.sha256() != other.sha256()
