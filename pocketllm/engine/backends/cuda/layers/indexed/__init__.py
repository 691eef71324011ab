"""Attention over groups of tokens that an index picks, rows of hashed n-grams, and gates of streams."""
