"""Tokenizer, template, detokenizer: made from plain metadata."""
