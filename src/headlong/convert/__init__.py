"""One checkpoint written as another: from safetensors to GGUF and back. Knows formats; no engine runs here."""
