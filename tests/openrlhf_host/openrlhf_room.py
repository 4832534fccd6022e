"""Attaches the CPU room where it is imported: before OpenRLHF, torch and DeepSpeed."""

from metronome_openrlhf import cpu

cpu.attach()
