"""Metronome in verl: an outside package that verl finds by its entry point; nothing is imported here."""
