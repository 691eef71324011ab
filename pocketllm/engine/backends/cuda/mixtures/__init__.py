"""Mixtures of experts: their routes, their kernels, and what launches those."""
