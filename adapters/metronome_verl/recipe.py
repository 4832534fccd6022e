"""The schema of a recipe for verl, whose keys may be spelt with ``+``."""

from __future__ import annotations

from typing import Literal

from metronome.overlays import LayeredRecipe, Machine, Settings, layered


class Recipe(LayeredRecipe):
    """A recipe for verl.

    ``args`` are verl's own configuration keys; ``+`` before a key adds it, as on verl's command line. ``assets`` is a
    folder with ``model``, ``train.parquet``, ``validation.parquet`` and ``reward.py`` (``compute_score``).
    """

    host: Literal["verl"]


def settings_of(recipe: Recipe, typed: Settings, machine: Machine | None = None) -> Settings:
    """verl's keys and ours, by ``layered``; ``+key`` and ``key`` are one key, and ``+`` stays where it's written."""
    return layered(recipe, typed, machine, lambda key: key.lstrip("+"))
