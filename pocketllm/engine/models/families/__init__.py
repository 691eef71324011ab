"""One file an architecture; the file name is the registry key."""
