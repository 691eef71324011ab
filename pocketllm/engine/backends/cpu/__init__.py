"""The CPU backend: packed weights and native kernels, numpy at its edge, no torch."""
