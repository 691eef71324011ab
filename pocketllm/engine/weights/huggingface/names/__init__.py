"""One file an architecture: `MODEL_TYPES` of config.json, GGUF `ARCHITECTURE`, and `read(config)` for the rest."""
