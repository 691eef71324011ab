"""One request lifecycle and one scheduler, for every family."""
