"""Runs on a machine with an NVIDIA GPU: parity in float64 with poisoned outputs, and times; not part of the suite."""
