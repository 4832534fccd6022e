"""Policy losses: A-3PO (arXiv 2512.06547) and plain clipped PPO."""
