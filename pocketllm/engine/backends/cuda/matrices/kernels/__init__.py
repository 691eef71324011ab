"""What brings a file's bytes into the layout of packed matrices."""
