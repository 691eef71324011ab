"""Kinds of layers, each with its kernels and operations in a folder of its own."""
