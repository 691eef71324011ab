"""Kernels over parallel residual streams."""
