"""The process of a host's run ends when ours is asked to end."""

import subprocess
import sys


def test_a_scheduler_s_signal_ends_verl_too():
    """In a process of its own: the child is asked to end, and its exit code comes back."""
    script = (
        "import os, signal, sys, threading\n"
        "from metronome.host_process import start\n"
        "threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()\n"
        "sys.exit(0 if start(['sleep', '60'], dict(os.environ)) == -signal.SIGTERM else 1)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=50).returncode == 0
