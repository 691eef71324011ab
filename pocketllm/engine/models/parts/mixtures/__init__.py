"""Mixtures of experts, one file a kind."""
