"""Programmatic dependent launch: a product's blocks start while the last kernel runs, and load weights meanwhile.

Every kernel begins with `wait`, which lets the next one start. Products alone are launched with `OPTIONS`, and wait
only when they need x: on an H200, steps in which the small kernels too began early were slower, most of all with
thousands of cached tokens (2.99 instead of 2.57 ms).
"""

import os

import triton
import triton.language as tl

IS_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


def has_dependent_launch() -> bool:
    """Whether the GPU (Hopper and later) and this Triton know it."""
    import torch

    is_new = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    return not IS_INTERPRETED.value and is_new and hasattr(tl.extra.cuda, "gdc_wait")


IS_DEPENDENT = tl.constexpr(has_dependent_launch())
OPTIONS = {"launch_pdl": True} if IS_DEPENDENT.value else {}
"""Keyword arguments of a launch that may begin early."""


@triton.jit
def wait():
    """Return when all kernels before this one have finished; those after it may start."""
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
