"""Kernels over cached rows that all heads share."""
