"""One file a format; `registry` chooses."""
