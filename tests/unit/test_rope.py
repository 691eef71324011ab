"""Frequencies and magnitude of each rope scaling."""

import numpy as np
import pytest

from pocketllm.engine.models.header import HeaderReader
from pocketllm.engine.models.rope import RopeSpec, inverse_frequencies, read_rope, rope_magnitude

PLAIN = 10000.0 ** (-np.arange(0, 64, 2) / 64)


def spec(**keys: object) -> RopeSpec:
    header = HeaderReader({f"llama.rope.{name.replace('__', '.')}": value for name, value in keys.items()}, "llama")
    read = read_rope(header, 64, 4096)
    assert header.problems == []
    return read


def test_without_scaling_a_pair_turns_theta_to_the_minus_2i_over_d() -> None:
    assert np.allclose(inverse_frequencies(spec()), PLAIN, rtol=1e-7)
    assert inverse_frequencies(spec()).dtype == np.float32
    assert rope_magnitude(spec()) == 1.0


def test_type_none_ignores_a_factor() -> None:
    assert np.allclose(inverse_frequencies(spec(scaling__type="none", scaling__factor=4.0)), PLAIN, rtol=1e-7)


@pytest.mark.parametrize(
    "keys", [{"scaling__type": "linear", "scaling__factor": 4.0}, {"scaling__factor": 4.0}, {"scale_linear": 4.0}]
)
def test_linear_scaling_divides_every_frequency(keys: dict[str, object]) -> None:
    assert np.allclose(inverse_frequencies(spec(**keys)), PLAIN / 4.0, rtol=1e-7)
    assert rope_magnitude(spec(**keys)) == 1.0


def test_divisors_come_before_the_scaling() -> None:
    divisors = np.linspace(1, 8, 32).astype(np.float32)

    assert np.allclose(inverse_frequencies(spec(scaling__factor=2.0), divisors), PLAIN / divisors / 2, rtol=1e-6)


def test_yarn_keeps_fast_pairs_interpolates_slow_ones_and_ramps_between() -> None:
    # factor 64 over 4096 tokens: 32 turns at pair 10.47, one at 22.51, so the ramp runs from 10 to 23
    yarn = spec(scaling__type="yarn", scaling__factor=64.0, scaling__original_context_length=4096)
    share = inverse_frequencies(yarn) / PLAIN

    assert np.allclose(share[:11], 1.0, rtol=1e-6)
    assert np.allclose(share[23:], 1 / 64, rtol=1e-6)
    assert np.all(np.diff(share[10:24]) < 0)
    assert np.allclose(share[16], 1 - 6 / 13 * (1 - 1 / 64), rtol=1e-6)
    assert rope_magnitude(yarn) == pytest.approx(1.4158883, abs=1e-7)


def test_yarns_original_context_is_the_files_context_when_it_says_none() -> None:
    said = spec(scaling__type="yarn", scaling__factor=4.0, scaling__original_context_length=4096)

    assert spec(scaling__type="yarn", scaling__factor=4.0) == said


def test_the_files_attention_factor_multiplies_what_yarn_implies() -> None:
    yarn = spec(scaling__type="yarn", scaling__factor=8.0, scaling__attn_factor=0.5)

    assert rope_magnitude(yarn) == pytest.approx(0.5 * (1 + 0.1 * np.log(8)))
    assert rope_magnitude(spec(scaling__attn_factor=0.5)) == 0.5


def test_what_a_file_says_of_yarn_stands_for_what_its_factor_implies() -> None:
    yarn = {"scaling__type": "yarn", "scaling__factor": 8.0, "scaling__yarn_attn_factor": 0.7}

    assert rope_magnitude(spec(**yarn)) == pytest.approx(0.7)
    assert rope_magnitude(spec(**yarn, scaling__attn_factor=0.5)) == pytest.approx(0.35)
    assert rope_magnitude(spec(**{**yarn, "scaling__type": "linear"})) == 1.0


def test_a_ramp_of_no_width_divides_nothing_by_zero() -> None:
    keys = {"scaling__type": "yarn", "scaling__factor": 4.0, "scaling__original_context_length": 2}

    assert np.isfinite(inverse_frequencies(spec(**keys))).all()


@pytest.mark.parametrize(
    ("name", "value"), [("freq_base", 0.0), ("scaling.factor", "four"), ("freq_base", float("nan"))]
)
def test_a_key_that_is_no_usable_number_is_named(name: str, value: object) -> None:
    header = HeaderReader({f"llama.rope.{name}": value}, "llama")
    read_rope(header, 64, 4096)

    assert header.problems == [f"metadata key llama.rope.{name} is {value!r}: it must be a number above 0"]
