"""The papers' rows, shown as far as this machine can: ``metronome reproduce``."""
