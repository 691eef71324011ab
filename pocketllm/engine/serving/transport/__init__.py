"""From bytes to calls and back: the door, bodies, events between threads, and a line in the log."""
