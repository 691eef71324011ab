"""Kinds of attention that several families share."""
