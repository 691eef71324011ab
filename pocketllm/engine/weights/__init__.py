"""Checkpoints on disk: found, read, checked, decoded."""
