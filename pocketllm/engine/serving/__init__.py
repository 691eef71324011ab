"""The OpenAI surface: knows requests and events, not tensors."""
