"""What machines see of a server: its metrics and its traces."""
