"""``python -m metronome_openrlhf``."""

import sys

from metronome_openrlhf.launch import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
