"""A Hugging Face directory (config.json, tokenizer.json, *.safetensors) as the GGUF checkpoint that it would be."""
