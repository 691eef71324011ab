"""The GGUF header reader: what is right is read exactly, what is wrong is one sentence and costs nothing.

Times are this process's own, so that a busy machine fails nothing.
"""

import random
import struct
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pocketllm.engine.weights.checkpoint import open_checkpoint
from pocketllm.engine.weights.gguf import open_gguf
from pocketllm.errors import CheckpointError, GGUFError
from tests.gguf_files import (
    ARRAY,
    BOOL,
    F32,
    F64,
    I32,
    I64,
    STRING,
    U8,
    U32,
    U64,
    array,
    gguf_bytes,
    key,
    tensor,
    text,
    write_checkpoint,
)

Save = Callable[[bytes], Path]
ARCHITECTURE = key("general.architecture", STRING, text("llama"))


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Write bytes to a file and give its path."""

    def write(content: bytes) -> Path:
        path = tmp_path / "some.gguf"
        path.write_bytes(content)
        return path

    return write


# -- what is right ----------------------------------------------------------------------------------------------------


def test_every_value_type_is_read_back(save: Save) -> None:
    keys = [
        key("u8", U8, b"\xff"),
        key("i32", I32, struct.pack("<i", -7)),
        key("u64", U64, struct.pack("<Q", 2**64 - 1)),
        key("i64", I64, struct.pack("<q", -(2**63))),
        key("f32", F32, struct.pack("<f", 0.5)),
        key("f64", F64, struct.pack("<d", 0.1)),
        key("yes", BOOL, b"\1"),
        key("text", STRING, text("Grüße 🙂")),
        key("texts", ARRAY, array(STRING, 3, text("a") + text("") + text("ü"))),
        key("floats", ARRAY, array(F32, 2, struct.pack("<2f", 1.0, -2.0))),
        key("bools", ARRAY, array(BOOL, 2, b"\1\0")),
        key("empty", ARRAY, array(STRING, 0, b"")),
        key("nested", ARRAY, array(ARRAY, 2, array(I32, 1, struct.pack("<i", 4)) + array(STRING, 1, text("x")))),
    ]
    metadata = open_gguf(save(gguf_bytes(keys))).metadata

    assert dict(metadata) == {
        "u8": 255,
        "i32": -7,
        "u64": 2**64 - 1,
        "i64": -(2**63),
        "f32": 0.5,
        "f64": 0.1,
        "yes": True,
        "text": "Grüße 🙂",
        "texts": ["a", "", "ü"],
        "floats": [1.0, -2.0],
        "bools": [True, False],
        "empty": [],
        "nested": [[4], ["x"]],
    }
    assert type(metadata["yes"]) is bool
    assert type(metadata["u8"]) is int


def test_arrays_are_described_and_sampled_without_decoding_them(save: Save) -> None:
    metadata = open_gguf(
        save(
            gguf_bytes([key("t", ARRAY, array(STRING, 3, text("a") + text("b") + text(b"\xff"))), key("n", U8, b"\1")])
        )
    ).metadata

    info = metadata.array("t")
    assert info is not None
    assert (info.element_type, info.count) == ("string", 3)
    assert metadata.head("t", 2) == ["a", "b"]
    assert metadata.array("n") is None
    with pytest.raises(GGUFError, match=r"element 2 of 't' is not UTF-8"):
        metadata["t"]


def test_an_array_that_a_reader_changes_is_whole_for_the_next(save: Save) -> None:
    metadata = open_gguf(save(gguf_bytes([key("t", ARRAY, array(U8, 2, b"\1\2"))]))).metadata
    metadata["t"].clear()

    assert metadata["t"] == [1, 2]


def test_a_version_2_file_reads_the_same(save: Save) -> None:
    opened = open_gguf(save(gguf_bytes([ARCHITECTURE], [tensor("a", [2])], b"\0" * 8, version=2)))

    assert (opened.version, list(opened.tensors), opened.metadata["general.architecture"]) == (2, ["a"], "llama")


def test_shapes_are_row_major_and_data_is_the_tensors_own(tmp_path: Path) -> None:
    values = {"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.ones(5, np.float32)}
    opened = open_gguf(write_checkpoint(tmp_path / "x.gguf", values))

    for name, expected in values.items():
        assert opened.tensors[name].shape == expected.shape
        np.testing.assert_array_equal(opened.data(opened.tensors[name]).view("<f4").reshape(expected.shape), expected)


def test_the_reader_agrees_with_the_gguf_package(tiny_gguf: Path) -> None:
    ours, theirs = open_gguf(tiny_gguf), GGUFReader(tiny_gguf)

    assert list(ours.tensors) == [item.name for item in theirs.tensors]
    for item in theirs.tensors:
        info = ours.tensors[item.name]
        assert info.shape == tuple(reversed([int(n) for n in item.shape]))
        assert (info.quant_type, info.num_bytes, info.start) == (item.tensor_type.name, item.n_bytes, item.data_offset)
    for name, field in theirs.fields.items():
        if not name.startswith("GGUF."):
            assert ours.metadata[name] == field.contents(), name


def test_garbage_after_the_last_tensor_is_tolerated(save: Save) -> None:
    path = save(gguf_bytes([ARCHITECTURE], [tensor("a", [2])], b"\0" * 8 + b"trailing"))

    assert open_gguf(path).tensors["a"].num_bytes == 8


def test_another_alignment_is_honored(save: Save) -> None:
    keys = [key("general.alignment", U32, struct.pack("<I", 64))]
    data = struct.pack("<2f", 3, 4) + b"\0" * 56 + struct.pack("<f", 5)
    opened = open_gguf(save(gguf_bytes(keys, [tensor("a", [2]), tensor("b", [1], offset=64)], data, alignment=64)))

    assert opened.data(opened.tensors["b"]).view("<f4").tolist() == [5]


# -- B115: unknown types stay representable ---------------------------------------------------------------------------


@pytest.mark.parametrize(("type_id", "name"), [(39, "MXFP4"), (143, "PTQ1_0"), (250, "TYPE_250")])
def test_a_file_with_a_type_we_cannot_decode_opens_and_names_it(save: Save, type_id: int, name: str) -> None:
    opened = open_gguf(
        save(gguf_bytes([ARCHITECTURE], [tensor("a", [128], type_id), tensor("b", [1], offset=128)], b"\0" * 132))
    )

    assert opened.tensors["a"].quant_type == name
    assert opened.tensors["a"].num_bytes == {"MXFP4": 68, "PTQ1_0": 28, "TYPE_250": 128}[name]
    assert opened.tensors["a"].has_known_type is (type_id != 250)


# -- B103 to B106: what is wrong --------------------------------------------------------------------------------------

BROKEN = {
    "n_dims 1e6": (gguf_bytes([], [tensor("t", [1], num_dimensions=10**6)]), "tensor 't' has 1000000 dimensions"),
    "n_dims 2^32-1": (gguf_bytes([], [tensor("t", [1], num_dimensions=2**32 - 1)]), "has 4294967295 dimensions"),
    "dims 2^32 x 2^32": (gguf_bytes([], [tensor("t", [2**32, 2**32])], b"\0" * 64), "'t' has dimensions"),
    "dims wrap to 4": (gguf_bytes([], [tensor("t", [4, 2**62 + 1])], b"\0" * 64), "over 2\\^63 values"),
    "dims 2^42 + 1": (gguf_bytes([], [tensor("t", [64, 2**42 + 1])], b"\0" * 64), "is truncated: tensor 't' needs"),
    "dimension 0": (gguf_bytes([], [tensor("t", [4, 0])], b"\0" * 64), "'t' has a dimension of 0: \\[4, 0\\]"),
    "array count 2^40": (
        gguf_bytes([key("a", ARRAY, array(U8, 2**40, b"\0"))]),
        "element count of array 'a' is 1099511627776",
    ),
    "array count past the end": (
        gguf_bytes([key("a", ARRAY, array(U32, 1000, b"\0" * 40))]),
        "element count of array 'a' is 1000, but at most",
    ),
    "string array count 2^40": (gguf_bytes([key("a", ARRAY, array(STRING, 2**40, b""))]), "element count of array 'a'"),
    "string length 2^63": (gguf_bytes([key("s", STRING, struct.pack("<Q", 2**63))]), "text of 's' needs 92233720"),
    "key length 2^63": (gguf_bytes([struct.pack("<Q", 2**63) + b"\0" * 32]), "metadata key 0 is 92233720"),
    "element length": (
        gguf_bytes([key("a", ARRAY, array(STRING, 2, struct.pack("<QQ", 2**62, 0)))]),
        "'a' ends at element 1 of 2",
    ),
    "last element length": (
        gguf_bytes([key("a", ARRAY, array(STRING, 1, struct.pack("<Q", 500)))]),
        "the last text of 'a' leaves the file",
    ),
    "key count": (gguf_bytes([ARCHITECTURE], num_keys=2**60), "metadata key count is 1152921504606846976"),
    "tensor count": (gguf_bytes([ARCHITECTURE], num_tensors=2**60), "tensor count is 1152921504606846976"),
    "empty key": (gguf_bytes([key("", U8, b"\0" * 33)]), "metadata key 0 is empty"),
    "empty tensor name": (gguf_bytes([], [tensor("", [1])], b"\0" * 4), "name of tensor 0 is empty"),
    "duplicate key": (gguf_bytes([key("a", U8, b"\0"), key("a", U8, b"\1")]), "metadata key 'a' occurs twice"),
    "duplicate tensor": (gguf_bytes([], [tensor("t", [1])] * 2, b"\0" * 64), "tensor 't' occurs twice"),
    "value type": (gguf_bytes([key("a", 13, b"\0" * 8)]), "'a' has value type 13"),
    "element type": (gguf_bytes([key("a", ARRAY, array(99, 1, b"\0" * 8))]), "array 'a' has element type 99"),
    "bool of 2": (gguf_bytes([key("a", BOOL, b"\2")]), "'a' is a bool of 2"),
    "key not UTF-8": (gguf_bytes([key(b"\xff\xfe", U8, b"\0" * 20)]), "metadata key 0 is not UTF-8"),
    "deep arrays": (
        gguf_bytes([key("a", ARRAY, array(ARRAY, 1, b"") * 50 + array(U8, 0, b""))]),
        "'a' nests arrays more than 4 deep",
    ),
    "version 1": (gguf_bytes([ARCHITECTURE], version=1), "GGUF version is 1, but only 2 and 3"),
    "big-endian": (gguf_bytes([ARCHITECTURE], version=3 << 24), "is a big-endian GGUF"),
    "alignment 0": (gguf_bytes([key("general.alignment", U32, b"\0\0\0\0")]), "general.alignment is 0"),
    "alignment 48": (gguf_bytes([key("general.alignment", U32, b"\x30\0\0\0")]), "general.alignment is 48"),
    "alignment text": (gguf_bytes([key("general.alignment", STRING, text("32"))]), "general.alignment is '32'"),
    "alignment 2^31": (
        gguf_bytes([key("general.alignment", U32, b"\0\0\0\x80")], [tensor("t", [1])], b"\0" * 64),
        "is truncated: tensor 't' needs bytes 2147483648",
    ),
    "offset not aligned": (gguf_bytes([], [tensor("t", [1], offset=4)], b"\0" * 64), "'t' starts at offset 4, which"),
    "offset 2^63": (gguf_bytes([], [tensor("t", [1], offset=2**63)], b"\0" * 64), "is truncated: tensor 't' needs"),
    "overlap": (
        gguf_bytes([], [tensor("t", [16]), tensor("u", [1], offset=32)], b"\0" * 128),
        "tensors 't' and 'u' overlap at byte",
    ),
    "same place": (gguf_bytes([], [tensor("t", [1], 250), tensor("u", [1], 250)], b"\0" * 64), "'t' and 'u' overlap"),
    "half a block": (gguf_bytes([], [tensor("t", [48], 2)], b"\0" * 64), "'t' has rows of 48 values, which is not a m"),
    "header cut": (gguf_bytes([ARCHITECTURE])[:20], "a GGUF starts with 24 bytes, the file has 20"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_header_is_one_sentence_that_names_the_field(save: Save, name: str) -> None:
    content, message = BROKEN[name]
    tracemalloc.start()
    began = time.process_time()
    with pytest.raises(GGUFError, match=message) as caught:
        open_gguf(save(content))
    elapsed_s, peak_bytes = time.process_time() - began, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert "some.gguf" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    assert elapsed_s < 1
    assert peak_bytes < 1_000_000


@pytest.mark.parametrize(
    ("element", "count"), [(array(U8, 0, b""), 600_000), (text(""), 4_200_000)], ids=["arrays", "texts"]
)
def test_many_small_elements_cannot_make_the_walk_long(save: Save, element: bytes, count: int) -> None:
    kind = STRING if element == text("") else ARRAY
    keys = [key(f"a{i}", ARRAY, array(kind, count // 2, element * (count // 2))) for i in range(2)]
    path = save(gguf_bytes(keys))
    began = time.process_time()
    with pytest.raises(GGUFError, match="element count of array 'a1'"):
        open_gguf(path)

    assert time.process_time() - began < 1


@pytest.mark.parametrize("share", [0.0001, 0.1, 0.5, 0.99])
def test_a_truncated_file_is_refused_before_any_data_is_read(tiny_gguf: Path, save: Save, share: float) -> None:
    whole = tiny_gguf.read_bytes()
    with pytest.raises(GGUFError, match=r"truncated|in this file of"):
        open_gguf(save(whole[: int(len(whole) * share)]))


def test_a_file_one_byte_short_names_the_tensor_and_both_sizes(tiny_gguf: Path, save: Save) -> None:
    last = max(open_gguf(tiny_gguf).tensors.values(), key=lambda item: item.start)
    end = last.start + last.num_bytes
    path = save(tiny_gguf.read_bytes()[: end - 1])

    with pytest.raises(
        GGUFError, match=f"'{last.name}' needs bytes {last.start} to {end}, but .* only {end - 1} bytes"
    ):
        open_gguf(path)


@pytest.mark.model
@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_the_default_model_cut_short_names_a_tensor(smollm2: Path, tmp_path: Path, share: float) -> None:
    path = tmp_path / "cut.gguf"
    size = int(smollm2.stat().st_size * share)
    with smollm2.open("rb") as file:
        path.write_bytes(file.read(size))

    with pytest.raises(GGUFError, match=rf"cut.gguf is truncated: tensor '.*' needs bytes .* only {size} bytes"):
        open_gguf(path)


# -- size and speed ---------------------------------------------------------------------------------------------------


def test_a_vocabulary_of_262144_tokens_opens_in_half_a_second(save: Save) -> None:
    count = 262_144
    words = b"".join(text(f"token{i}") for i in range(count))
    keys = [
        key("tokenizer.ggml.tokens", ARRAY, array(STRING, count, words)),
        key("tokenizer.ggml.merges", ARRAY, array(STRING, count, words)),
        key("tokenizer.ggml.scores", ARRAY, array(F32, count, b"\0" * 4 * count)),
        key("tokenizer.ggml.token_type", ARRAY, array(I32, count, b"\0" * 4 * count)),
    ]
    path = save(gguf_bytes(keys))
    began = time.process_time()
    opened = open_gguf(path)
    elapsed_s = time.process_time() - began

    assert opened.metadata["tokenizer.ggml.tokens"][-1] == "token262143"
    assert len(opened.metadata["tokenizer.ggml.scores"]) == count
    assert elapsed_s < 0.5


def test_a_file_of_many_gib_opens_without_touching_its_data(tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    rows, row = 1 << 20, 1 << 12
    head = gguf_bytes([ARCHITECTURE], [tensor("large", [row, rows])])
    with path.open("wb") as file:  # sparse: 16 GiB that take no room
        file.write(head)
        file.truncate(len(head) + rows * row * 4)
    began = time.process_time()
    opened = open_gguf(path)

    assert time.process_time() - began < 0.2
    assert opened.tensors["large"].num_bytes == 16 << 30


# -- fuzz -------------------------------------------------------------------------------------------------------------


def walk_everything(path: Path) -> None:
    """All that inspect and a loader would ask for."""
    with open_checkpoint(path) as checkpoint:
        for name in checkpoint.metadata:
            checkpoint.metadata[name]
        for name, info in checkpoint.tensors.items():
            assert checkpoint.data(name).nbytes == info.num_bytes
        assert checkpoint.architecture


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A valid file of a few KB with every kind of thing in it."""
    path = tmp_path_factory.mktemp("fuzz") / "small.gguf"
    values = {f"blk.{i}.weight": np.ones((4, 8), np.float32) for i in range(4)}
    write_checkpoint(path, values, tokens=["a", "bc", "ü"], scores=[0.5, 1.5], general__alignment=32, flag=True)
    return path.read_bytes()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    edits=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=4),
    cut=st.floats(0, 1),
    keep_whole=st.booleans(),
)
def test_a_damaged_file_is_never_anything_but_a_checkpoint_error(
    small_file: bytes,
    tmp_path: Path,
    edits: list[tuple[float, int]],
    cut: float,
    keep_whole: bool,
) -> None:
    content = bytearray(small_file)
    for at, value in edits:
        content[int(at * len(content))] = value
    path = tmp_path / "fuzz.gguf"
    path.write_bytes(bytes(content) if keep_whole else bytes(content[: int(cut * len(content))]))
    began = time.process_time()
    # any other exception fails the test; a damaged float is still a valid file
    with suppress(CheckpointError):
        walk_everything(path)
    assert time.process_time() - began < 1


def test_every_single_byte_of_a_header_may_be_wrong(small_file: bytes, tmp_path: Path) -> None:
    rng = random.Random(5)
    path = tmp_path / "flip.gguf"
    refused = 0
    tracemalloc.start()
    for at in range(min(len(small_file), 700)):
        content = bytearray(small_file)
        content[at] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        began = time.process_time()
        try:
            walk_everything(path)
        except CheckpointError:
            refused += 1
        assert time.process_time() - began < 1, at
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert refused > 100
    assert peak_bytes < 100_000_000
