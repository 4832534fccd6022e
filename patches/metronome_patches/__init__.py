"""Guarded changes of a host, for adapters: post-import functions and the ledger of patches."""
