"""What a model is made of, read from a Hugging Face config.json or a GGUF file. No torch."""
