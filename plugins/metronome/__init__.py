"""Plug-ins that make language-model reinforcement learning faster inside the framework a team runs."""

from metronome.hookspecs import hookimpl, hookspec

__all__ = ["__version__", "hookimpl", "hookspec"]
__version__ = "0.1.0"
