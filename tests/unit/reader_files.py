"""Small records of runs, written as the hosts write them, for the tests of the readers."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

CLOCK = 7000.0
"""What the local host's monotonic clock shows at a run's start."""


def jsonl(path: Path, records: Iterable[Mapping[str, Any]], end: str = "\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(record) for record in records) + end, encoding="utf-8")
    return path


def period(
    number: int, arrivals: list[float], work: list[float], source: str = "periodic", **more: Any
) -> dict[str, Any]:
    """A line of metrics.jsonl whose seconds are the schedule's own: work as groups arrive, or after the last one."""
    free = 0.0
    for arrived, seconds in zip(
        [max(arrivals)] * len(work) if source == "synchronous" else arrivals, work, strict=True
    ):
        free = max(free, arrived) + seconds
    return {
        "period": number,
        "version": number - 1,
        "group_size": 2,
        "prompts": len(work),
        "reward": 0.25,
        "response_length": 4.0,
        "response_length_max": 7,
        "seconds": free + 0.3,
        "seconds_waiting": free - sum(work),
        "seconds_training": sum(work),
        "seconds_proximal": 0.1,
        "seconds_step": 0.2,
        "seconds_publish": 0.1,
        "arrivals": arrivals,
        "work": work,
        "tokens": len(work) * 2 * (10 + 4),
        "fingerprint": f"weights {number}",
    } | more


def groups(number: int, start: float, arrivals: list[float]) -> list[dict[str, Any]]:
    """The period's lines of groups.jsonl, for a period that starts at ``start`` on the machine's clock."""
    return [
        {
            "period": number,
            "index": 10 * number + place,
            "trained_at": number - 1,
            "versions": [number - 1],
            "size": 2,
            "worker": 0,
            "start": start + 0.001,
            "end": start + arrived,
            "rewards": [0.0, 0.5],
            "lengths": [1, 7],
            "texts": ["4", "I don't"],
        }
        for place, arrived in enumerate(arrivals)
    ]


RECIPE = """host: local
sampling: {slots: 8, max_tokens: 24}
machine: {workers: 1}
metronome: {rollout_source: %s, loss: ppo}
"""


def local_run(folder: Path, source: str = "periodic", gap: float = 0.5) -> tuple[Path, list[float]]:
    """A run folder of two periods with ``gap`` seconds between them; returns it and the periods' starts."""
    arrivals = [[1.0, 1.5, 4.0], [2.0, 2.1, 2.2]]
    lines, of_groups, starts, clock = [], [], [], 0.0
    for number, arrived in enumerate(arrivals, start=1):
        line = period(number, arrived, [0.8, 0.8, 0.8], source)
        starts.append(clock)
        lines.append(line)
        of_groups += groups(number, CLOCK + clock, arrived)
        clock += line["seconds"] + gap
    jsonl(folder / "metrics.jsonl", [{"period": 0, "held_out_accuracy": 0.1, "held_out_prompts": 3}, *lines])
    jsonl(folder / "groups.jsonl", of_groups)
    (folder / "recipe.yaml").write_text(RECIPE % source, encoding="utf-8")
    return folder, starts


# --- TensorBoard ------------------------------------------------------------------------------------


def event(wall_time: float, step: int, values: Mapping[str, float]) -> bytes:
    """One record of an event file, encoded here by hand."""
    summary = b"".join(
        _field(1, _field(1, tag.encode()) + b"\x15" + struct.pack("<f", value)) for tag, value in values.items()
    )
    message = b"\x09" + struct.pack("<d", wall_time) + b"\x10" + _varint(step) + _field(5, summary)
    header = struct.pack("<Q", len(message))
    return header + struct.pack("<I", masked_crc(header)) + message + struct.pack("<I", masked_crc(message))


def events(path: Path, records: Iterable[tuple[float, int, Mapping[str, float]]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(event(*record) for record in records))
    return path


def masked_crc(data: bytes) -> int:
    """CRC-32C bit by bit, then TFRecord's mask."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8) & 0xFFFFFFFF


def _field(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    result = b""
    while value > 0x7F:
        result += bytes([value & 0x7F | 0x80])
        value >>= 7
    return result + bytes([value])
