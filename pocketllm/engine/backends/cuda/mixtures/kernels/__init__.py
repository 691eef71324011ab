"""The Triton kernels of mixtures."""
