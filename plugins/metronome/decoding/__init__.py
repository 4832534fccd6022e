"""Text from a transformers model on the CPU: continuous batching, sampling, and weights that are replaced."""
