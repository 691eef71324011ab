"""What a model may ask of a backend."""
