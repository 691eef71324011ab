"""Triton kernels on packed weights, for NVIDIA GPUs."""
