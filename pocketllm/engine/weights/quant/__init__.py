"""One file a quant type."""
