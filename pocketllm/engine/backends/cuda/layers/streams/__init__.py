"""Parallel residual streams: how sublayers read them and write to them."""
