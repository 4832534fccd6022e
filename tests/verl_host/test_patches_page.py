"""docs/PATCHES.md is what the records say; ``python tests/verl_host/test_patches_page.py`` writes it."""

from pathlib import Path

import pytest

pytest.importorskip("verl")

from metronome_patches.ledger import ledger
from metronome_verl.cpu.patches import PATCHES
from metronome_verl.flush import FLUSH

OPENING = """\
Generated from the records in `adapters/metronome_verl` by `tests/verl_host/test_patches_page.py`, which keeps it
current. Each is applied only in the verl releases it names and only to an object that is what it expects; anything else
stops with an error. Everything else goes through verl's registries."""
PAGE = Path(__file__).parents[2] / "docs" / "PATCHES.md"


def test_the_page_is_what_the_records_say():
    assert PAGE.read_text(encoding="utf-8") == ledger(PATCHES, "verl", OPENING)
    assert FLUSH in PATCHES


if __name__ == "__main__":
    PAGE.write_text(ledger(PATCHES, "verl", OPENING), encoding="utf-8")
