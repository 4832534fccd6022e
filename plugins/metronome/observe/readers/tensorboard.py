"""Scalars of TensorBoard's event files, read without the package tensorboard.

The files are TFRecords (an 8-byte little-endian length, its masked CRC-32C, the data, its CRC) of Event messages in
protobuf's wire format; of those only ``wall_time`` (field 1), ``step`` (2) and the summary's (5) simple values (tag 1,
simple_value 2) are read, which is what torch's and tensorboardX's ``add_scalar`` write. The format is documented at
tensorflow.org (TFRecord) and in tensorboard's event.proto and summary.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from metronome.errors import ConfigurationError

PATTERN = "*tfevents*"
_MEND = "give the event file that the host itself wrote, or leave it out"


@dataclass(slots=True)
class Logged:
    """What was logged at one step: values by tag, and the clock time in seconds at which the first of them was."""

    wall_time: float
    values: dict[str, float] = field(default_factory=dict)
    where: str = ""


def read_scalars(files: Sequence[Path], notes: list[str]) -> dict[int, Logged]:
    """Step -> what was logged at it, over all ``files`` of one run in the order of their first events.

    Where a run was resumed and repeats a step, the later values stand and later steps of the old run are forgotten. A
    last record that is cut is left out with a note. Raises ConfigurationError for a file that isn't an event file.
    """
    result: dict[int, Logged] = {}
    streams = [(file, list(_events(file, notes))) for file in files]
    streams = [(file, events) for file, events in streams if events]
    for file, events in sorted(streams, key=lambda one: (one[1][0][0], one[0].name)):
        own: set[int] = set()
        for wall_time, step, values in events:
            if step not in own and step in result:
                for later in [one for one in result if one >= step and one not in own]:
                    del result[later]
            own.add(step)
            logged = result.setdefault(step, Logged(wall_time, where=f"{file}, step {step}"))
            logged.values.update(values)
    return dict(sorted(result.items()))


def _events(file: Path, notes: list[str]) -> Iterator[tuple[float, int, dict[str, float]]]:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"the file can't be read: {error}", found=str(file), remedy=_MEND) from None
    place = 0
    while place < len(data):
        header = data[place : place + 12]
        if len(header) == 12:
            length, check = struct.unpack("<QI", header)
            if _masked_crc(header[:8]) != check:
                raise ConfigurationError(
                    "this isn't a TensorBoard event file, or it is damaged",
                    found=f"a wrong checksum at byte {place}",
                    where=str(file),
                    remedy=_MEND,
                )
        if len(header) < 12 or place + 16 + length > len(data):
            notes.append(f"The last record of {file.name} is cut (a run that still writes, or was killed); left out.")
            return
        try:
            event = _event(data[place + 12 : place + 12 + length])
        except (IndexError, struct.error, UnicodeDecodeError, ValueError) as error:
            raise ConfigurationError(
                f"an event can't be read: {error}", found=f"byte {place}", where=str(file), remedy=_MEND
            ) from None
        if event[2]:
            yield event
        place += 16 + length


def _event(message: bytes) -> tuple[float, int, dict[str, float]]:
    wall_time, step, values = 0.0, 0, {}
    for number, value in _fields(message):
        if number == 1 and isinstance(value, bytes):
            (wall_time,) = struct.unpack("<d", value)
        elif number == 2 and isinstance(value, int):
            step = value
        elif number == 5 and isinstance(value, bytes):
            for inner, one in _fields(value):
                if inner == 1 and isinstance(one, bytes):
                    values.update(_value(one))
    return wall_time, step, values


def _value(message: bytes) -> dict[str, float]:
    tag, number = None, None
    for place, value in _fields(message):
        if place == 1 and isinstance(value, bytes):
            tag = value.decode()
        elif place == 2 and isinstance(value, bytes):
            (number,) = struct.unpack("<f", value)
    return {} if tag is None or number is None else {tag: float(number)}


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Field number and value: an int for varints, bytes for the rest."""
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        kind = key & 7
        if kind == 0:
            value, place = _varint(message, place)
            yield key >> 3, value
            continue
        if kind == 2:
            size, place = _varint(message, place)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"wire type {kind}")
        if place + size > len(message):
            raise ValueError("a field runs over its message")
        yield key >> 3, message[place : place + size]
        place += size


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
        if shift > 63:
            raise ValueError("a varint that doesn't end")


def _table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ 0x82F63B78 if byte & 1 else byte >> 1  # Castagnoli's polynomial, reflected
        table.append(byte)
    return table


_CRC = _table()


def _masked_crc(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
