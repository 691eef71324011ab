"""Their kernels."""
