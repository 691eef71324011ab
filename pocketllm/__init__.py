"""pocketllm: honest benchmarking and golden verification, over a full LLM inference engine.

Importing this package imports nothing heavy: torch, pandas and pyarrow arrive with the command that needs them.
"""

__version__ = "0.1.0"
