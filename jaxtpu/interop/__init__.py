"""Models of Hugging Face, in and out: safetensors, config.json, tokenizer files; never pickle."""
