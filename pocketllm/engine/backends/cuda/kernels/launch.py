"""Programmatic dependent launch: a kernel's blocks start while the last kernel ends, and wait before they read of it.

Every kernel of the decode path is launched with `OPTIONS` and begins with `wait`; what does not depend on other
kernels, such as the first weights of a product, may be loaded before it.
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
"""Keyword arguments of a launch."""


@triton.jit
def wait():
    """Return when all kernels before this one have finished; those after it may start."""
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
