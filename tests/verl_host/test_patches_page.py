"""docs/PATCHES.md is what the records say; ``python tests/verl_host/test_patches_page.py`` writes it."""

from pathlib import Path

import pytest

pytest.importorskip("verl")

from metronome_verl.cpu.patches import PATCHES
from metronome_verl.flush import FLUSH
from metronome_verl.patches import ledger

PAGE = Path(__file__).parents[2] / "docs" / "PATCHES.md"


def test_the_page_is_what_the_records_say():
    assert PAGE.read_text(encoding="utf-8") == ledger(PATCHES)
    assert FLUSH in PATCHES


if __name__ == "__main__":
    PAGE.write_text(ledger(PATCHES), encoding="utf-8")
