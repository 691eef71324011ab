"""The native library: found, opened once, and called through its plain C interface (native/runtime/abi.h).

The library lies beside this file when the package was built with a compiler. `POCKETLLM_CPU_LIBRARY` names another
file: for developers, who build it by hand.
"""

import ctypes
import errno
import os
import weakref
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from pocketllm.engine.weights.quant_types import BY_NAME
from pocketllm.errors import MachineError, OptionError, PocketLLMError, UnsupportedFeatureError

PATH_VARIABLE = "POCKETLLM_CPU_LIBRARY"
ABI_VERSION = 5
"""kAbiVersion in native/runtime/abi.h."""
NOTE = "native_build.txt"
"""What came of the build, beside the library."""
REMEDY = "install a C++17 compiler and install the package again, or take --backend reference"


class Step(ctypes.Structure):
    """native/runtime/phase.h, `Step`: counts and addresses of one batch."""

    _fields_ = (
        ("num_tokens", c_int32),
        ("num_logit_rows", c_int32),
        ("num_sequences", c_int32),
        ("table_width", c_int32),
        ("num_state_slots", c_int32),
        *(
            (name, c_void_p)
            for name in (
                "input_ids",
                "positions",
                "query_start_loc",
                "seq_lens",
                "block_table",
                "slot_mapping",
                "logit_rows",
                "state_slots",
                "window_table",
                "window_slots",
            )
        ),
    )


class ProjectionPlan(ctypes.Structure):
    """native/runtime/phases/phases.h, `ProjectionPlan`."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("residual", c_void_p), ("out", c_void_p))


class AttentionPlan(ctypes.Structure):
    """native/runtime/phases/phases.h, `AttentionPlan`."""

    _fields_ = (
        *((name, c_int32) for name in ("num_heads", "window")),
        *((name, c_float) for name in ("scale", "softcap")),
        ("sinks", c_void_p),
    )


class MixturePlan(ctypes.Structure):
    """native/runtime/phases/phases.h, `MixturePlan`."""

    _fields_ = (
        *((name, c_void_p) for name in ("gate", "up", "down", "bias")),
        *((name, c_int32) for name in ("num_experts", "num_used", "gating", "normalized")),
        ("scale", c_float),
        *((name, c_int32) for name in ("num_groups", "num_groups_used", "best_of_group")),
        *((name, c_void_p) for name in ("gate_bias", "up_bias", "down_bias")),
        *((name, c_float) for name in ("slope", "limit")),
        ("routes", c_void_p),
        ("num_routes", c_int32),
        ("expert_scale", c_void_p),
    )


class Rotation(ctypes.Structure):
    """native/kernels.h, `Rotation`."""

    _fields_ = tuple((name, c_int32) for name in ("head_dim", "first", "pairs", "half_split", "inverse"))


class IndexPlan(ctypes.Structure):
    """native/runtime/phases/phases.h, `IndexPlan`."""

    _fields_ = (
        *((name, c_int32) for name in ("num_heads", "dim", "num_best", "ratio", "expand")),
        *((name, c_void_p) for name in ("norm", "inv_freq")),
        ("pairs", c_int32),
        ("eps", c_float),
    )


class CompressPlan(ctypes.Structure):
    """native/runtime/phases/phases.h, `CompressPlan`."""

    _fields_ = (
        *((name, c_int32) for name in ("ratio", "dim", "overlaps", "pairs")),
        ("eps", c_float),
        *((name, c_void_p) for name in ("position", "norm", "inv_freq")),
    )


class WindowPlan(ctypes.Structure):
    """native/runtime/phases/phases.h, `WindowPlan`."""

    _fields_ = (
        *((name, c_int32) for name in ("num_heads", "dim", "window")),
        ("scale", c_float),
        ("sinks", c_void_p),
    )


class NGramPlan(ctypes.Structure):
    """native/runtime/phases/phases.h, `NGramPlan`."""

    _fields_ = (
        *((name, c_int32) for name in ("length", "heads_per_length")),
        ("end_token", c_int64),
        *((name, c_void_p) for name in ("multipliers", "sizes", "offsets")),
    )


class StatePlan(ctypes.Structure):
    """native/runtime/phases/phases.h, `StatePlan`."""

    _fields_ = (("states", c_void_p), ("slot_floats", c_int64), ("num_slots", c_int32))


class DeltaPlan(ctypes.Structure):
    """native/runtime/phases/phases.h, `DeltaPlan`."""

    _fields_ = (
        *((name, c_int32) for name in ("num_key_heads", "num_value_heads", "key_dim", "value_dim", "is_tiled")),
        ("eps", c_float),
        *((name, c_void_p) for name in ("rate", "time_bias")),
    )


class KimiPlan(ctypes.Structure):
    """native/runtime/phases/phases.h, `KimiPlan`."""

    _fields_ = (
        *((name, c_int32) for name in ("num_heads", "dim", "is_bounded")),
        *((name, c_float) for name in ("lower_bound", "eps")),
        *((name, c_void_p) for name in ("rate", "time_bias")),
    )


class StreamsPlan(ctypes.Structure):
    """native/runtime/phases/phases.h, `StreamsPlan`."""

    _fields_ = (
        *((name, c_int32) for name in ("num_streams", "iterations")),
        *((name, c_float) for name in ("eps", "clamp")),
        *((name, c_void_p) for name in ("scale", "base")),
        ("is_soft", c_int32),
    )


PHASES = {
    "embed": (c_void_p, c_float, c_void_p),
    "rms_norm": (c_int32, c_void_p, c_int32, c_void_p, c_int32, c_float, c_void_p),
    "project": (c_void_p, c_int32, c_void_p, c_int32, c_void_p, c_float, c_int32, c_int32, POINTER(ProjectionPlan)),
    "angles": (c_void_p, c_int32, c_float, c_void_p),
    "rope": (c_void_p, c_int32, c_void_p, POINTER(Rotation), c_void_p),
    "store_kv": (c_void_p, c_int32, c_void_p, c_void_p),
    "attend": (c_void_p, c_int32, POINTER(AttentionPlan), c_void_p, c_void_p, c_int32, c_void_p),
    "elementwise": (c_int32, c_int32, c_void_p, c_int32, c_void_p, c_void_p),
    "take": (c_void_p, c_int32, c_void_p),
    "mixture": (c_void_p, c_void_p, c_int32, c_void_p, c_int32, POINTER(MixturePlan), c_void_p),
    "project_heads": (c_void_p, c_void_p, c_int32, c_int32, c_void_p, c_int32, c_void_p),
    "store_latent": (c_void_p, c_int32, c_void_p, c_int32, c_void_p),
    "attend_latent": (
        *(c_void_p, c_int32, POINTER(AttentionPlan), c_void_p, c_int32),
        *(c_void_p, c_void_p, c_int32, c_void_p),
    ),
    "select": (c_void_p, c_int32, POINTER(IndexPlan), c_void_p, c_void_p, c_void_p),
    "compress": (c_void_p, c_int32, POINTER(CompressPlan), c_void_p, c_int32, c_void_p, POINTER(StatePlan)),
    "window_attend": (
        *(c_void_p, c_int32, POINTER(WindowPlan), c_void_p, c_void_p),
        *(POINTER(StatePlan), c_void_p, c_int32, c_void_p),
    ),
    "ngram_embed": (c_void_p, POINTER(NGramPlan), POINTER(StatePlan), c_void_p),
    "limited_mul": (c_int32, c_void_p, c_int32, c_void_p, c_float, c_void_p),
    "mul_each": (c_int32, c_void_p, c_int32, c_void_p, c_void_p),
    "columns": (c_int32, c_void_p, c_int32, c_int32, c_int32, c_void_p),
    "layer_norm": (c_int32, c_void_p, c_int32, c_void_p, c_void_p, c_float, c_void_p),
    "scale": (c_int32, c_void_p, c_int32, c_float, c_void_p),
    "gate_rows": (c_void_p, c_int32, c_void_p, c_void_p),
    "hadamard": (c_int32, c_void_p, c_int32, c_void_p, c_int32, c_int32, c_void_p),
    "causal_conv": (c_void_p, c_int32, c_void_p, c_int32, c_int32, c_int32, POINTER(StatePlan), c_void_p),
    "gated_delta": (c_void_p, c_int32, c_void_p, c_void_p, POINTER(DeltaPlan), POINTER(StatePlan), c_void_p),
    "kimi_delta": (*(c_void_p,) * 5, POINTER(KimiPlan), POINTER(StatePlan), c_void_p),
    "open_streams": (c_void_p, c_int32, c_int32, c_void_p),
    "read_streams": (c_int32, c_void_p, c_int32, c_void_p, POINTER(StreamsPlan), c_void_p, c_void_p),
    "write_streams": (c_void_p, c_int32, c_void_p, c_void_p, c_int32, c_void_p),
    "mean_streams": (c_int32, c_void_p, c_int32, c_int32, c_void_p),
    "gated_streams": (c_void_p, c_int32, c_void_p, c_void_p, c_int32, c_void_p),
    "gate_streams": (c_void_p, c_int32, c_void_p, c_void_p, c_int32, c_void_p),
}
"""Functions that append to a program, with their arguments after it."""

OTHERS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "abi_version": (c_int32, ()),
    "problem": (c_char_p, ()),
    "usable_isas": (c_char_p, ()),
    "bytes_per_element": (c_double, (c_int32,)),
    "engine_new": (c_void_p, (c_int32, c_char_p)),
    "engine_free": (None, (c_void_p,)),
    "engine_isa": (c_char_p, (c_void_p,)),
    "matrix_new": (c_void_p, (c_void_p, c_int32, c_void_p, c_int64, c_int32, c_int32, c_void_p)),
    "profile_start": (None, (c_void_p,)),
    "profile_read": (c_char_p, (c_void_p, c_int32, POINTER(c_double))),
    "kv_new": (c_void_p, (c_int32,) * 8),
    "latent_new": (c_void_p, (c_int32,) * 5),
    "compressed_new": (c_void_p, (c_int32,) * 6),
    "kv_free": (None, (c_void_p,)),
    "kv_data": (c_void_p, (c_void_p, POINTER(c_int64))),
    "program_new": (c_void_p, (c_void_p, c_int32)),
    "program_free": (None, (c_void_p,)),
    "ready": (c_int32, (c_void_p, c_void_p, c_int64)),
    "run": (c_int32, (c_void_p, POINTER(Step))),
}


class Functions:
    """The library's functions as attributes, without their prefix."""

    def declare(self, whole: ctypes.CDLL, name: str, result: Any, arguments: tuple[Any, ...]) -> None:
        """Say how one is called."""
        function = getattr(whole, f"pocketllm_{name}")
        function.restype, function.argtypes = result, arguments
        setattr(self, name, function)


def library_path() -> Path:
    """Where the library is looked for."""
    return Path(os.environ.get(PATH_VARIABLE) or Path(__file__).with_name("libpocketllm_cpu.so"))


@cache
def open_library() -> Any:
    """The library's functions without their prefix, arguments declared.

    Raises UnsupportedFeatureError when the package was built without it, or it is not the one this file speaks to;
    OptionError when that one was named on purpose: nothing takes its place.
    """
    path = library_path()
    if not path.exists():
        raise unusable(f"there is no file {path}" if os.environ.get(PATH_VARIABLE) else why_missing())
    try:
        whole = ctypes.CDLL(str(path))
        functions: Any = Functions()
        for name, (result, arguments) in OTHERS.items():
            functions.declare(whole, name, result, arguments)
        for name, more in PHASES.items():
            functions.declare(whole, name, c_int32, (c_void_p, *more))
    except (OSError, AttributeError) as error:
        raise unusable(f"{path} cannot be used: {error}") from error
    if functions.abi_version() != ABI_VERSION:
        found, whose = functions.abi_version(), path if os.environ.get(PATH_VARIABLE) else "its native library"
        raise unusable(f"{whose} has interface {found} and the package needs {ABI_VERSION}: install the package again")
    return functions


def unusable(reason: str) -> PocketLLMError:
    """Why the library cannot be used: of the installed one a backend's reason, of one that was named an error."""
    if os.environ.get(PATH_VARIABLE):
        return OptionError(f"{PATH_VARIABLE}: {reason}; name a library that was built, or unset it")
    return UnsupportedFeatureError("backend cpu", [reason])


def why_missing() -> str:
    """Why there is no library, and what to do, without a path of this machine: records keep it."""
    try:
        built = Path(__file__).with_name(NOTE).read_text(encoding="utf-8").strip()
    except OSError:
        built = "not built"
    return f"its native library was {built if built.startswith('not built') else 'removed'}: {REMEDY}"


@cache
def bytes_per_element() -> dict[str, float]:
    """Bytes that an element of a matrix takes once loaded, by the quant types that the library has kernels for."""
    found = {name: open_library().bytes_per_element(kind.type_id) for name, kind in BY_NAME.items()}
    return {name: num_bytes for name, num_bytes in found.items() if num_bytes}


def usable_isas() -> tuple[str, ...]:
    """Instruction sets that the library has kernels for and this processor can run, best first."""
    return tuple(open_library().usable_isas().decode().split())


def refuse() -> Exception:
    """What the last call of this thread failed with."""
    problem = open_library().problem().decode()
    return MachineError(f"cpu backend: {problem}") if problem == "out of memory" else ValueError(problem)


class Native:
    """An object of the library, freed with this one; what it needs is kept until then."""

    def __init__(self, address: int | None, free: Any, *needs: Any) -> None:
        if not address:
            raise refuse()
        self.address = address
        self.needs = needs
        if free is not None:
            weakref.finalize(self, free, address)


class Engine(Native):
    """Threads, an instruction set, and the matrices that it keeps."""

    def __init__(self, threads: int, isa: str | None) -> None:
        self.library = open_library()
        address = self.library.engine_new(threads, (isa or "").encode())
        if not address and self.library.problem().decode() == os.strerror(errno.EAGAIN):
            raise MachineError(f"cpu backend: this machine starts no {threads} threads now: lower --threads")
        super().__init__(address, self.library.engine_free)

    @property
    def isa(self) -> str:
        name: str = self.library.engine_isa(self.address).decode()
        return name


class Program(Native):
    """A list of phases for steps of up to max_tokens."""

    def __init__(self, engine: Engine, max_tokens: int) -> None:
        library = self.library = engine.library
        super().__init__(library.program_new(engine.address, max_tokens), library.program_free, engine)

    def append(self, name: str, *arguments: Any) -> None:
        """Call one of PHASES."""
        if getattr(self.library, name)(self.address, *arguments):
            raise refuse()

    def ready(self, buffers: int, num_bytes: int) -> None:
        """Have the memory of its steps there: what its phases share, and its buffers at an address."""
        if self.library.ready(self.address, buffers, num_bytes):
            raise refuse()

    def run(self, step: Step) -> None:
        """Run all phases; the batch's arrays must be alive."""
        if self.library.run(self.address, step):
            raise refuse()
