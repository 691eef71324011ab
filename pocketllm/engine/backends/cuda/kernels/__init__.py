"""The Triton kernels; nothing here knows of models or batches."""
