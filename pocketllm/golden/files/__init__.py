"""Fixture files: how they are read and written, and where they lie."""
