"""Shared-prompt attention (arXiv 2511.18871): the prompt of a group stands once in the row."""
