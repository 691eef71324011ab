"""The form of an answer: held to a grammar, with tools that may be called, its thought told apart."""
