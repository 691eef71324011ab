"""Steps: batches on the device, and their capture as CUDA graphs."""
