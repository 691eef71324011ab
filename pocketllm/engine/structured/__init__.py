"""Answers that must obey a grammar: what was asked, compiled over a vocabulary, and the mask of each next token."""
