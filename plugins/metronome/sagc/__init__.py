"""Straggler-aware group control (SAGC, arXiv 2606.02218) and the fixed group size."""
