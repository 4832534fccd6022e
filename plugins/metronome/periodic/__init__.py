"""Periodic asynchrony (arXiv 2511.18871): rollout sources, the group stream, denominators, whitening."""
