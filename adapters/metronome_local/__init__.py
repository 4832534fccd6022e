"""The local host: trains a Hugging Face causal language model with all four hooks on one machine."""
