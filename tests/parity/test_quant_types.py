"""Every quant type in a whole model over the reference backend, held to the textbook on weights decoded by others."""

from pathlib import Path

import numpy as np
import pytest

from pocketllm.engine.weights import quant
from tests.parity.drive import Driver, chunks, nmse
from tests.parity.random_blocks import OF_SAFETENSORS, STORED, write_packed, write_twin
from tests.tiny import textbook_logits

TOLERANCE = 1e-9


@pytest.mark.parametrize("quant_type", sorted(STORED))
def test_a_model_in_this_type_computes_what_its_decoded_weights_say(quant_type: str, tmp_path: Path) -> None:
    ids = np.random.default_rng(5).integers(0, 512, 24)
    expected = textbook_logits(write_twin(tmp_path / "twin.gguf", quant_type, seed=5), ids)
    [got] = Driver(write_packed(tmp_path / "packed.gguf", quant_type, seed=5)).run([ids.tolist()], chunks(24, 7))

    assert nmse(got, expected) <= TOLERANCE


def test_every_type_that_can_be_decoded_is_tried_here_or_in_a_directory() -> None:
    assert set(quant.known_types()) == STORED | OF_SAFETENSORS | {"F32"}


def test_two_seeds_are_two_models(tmp_path: Path) -> None:
    ids = np.arange(10)
    one, two = (textbook_logits(write_twin(tmp_path / f"{seed}.gguf", "IQ2_S", seed), ids) for seed in (1, 2))

    assert nmse(one, two) > 0.1
