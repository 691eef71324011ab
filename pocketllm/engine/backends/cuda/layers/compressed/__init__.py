"""Groups of tokens that become entries, and attention over the latest tokens and over entries."""
