"""``python -m metronome_areal``."""

import sys

from metronome_areal.launch import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
