"""TensorBoard's event files, read without tensorboard."""

from __future__ import annotations

from pathlib import Path

import pytest
from reader_files import event, events, masked_crc

from metronome.errors import ConfigurationError
from metronome.observe.readers.tensorboard import _masked_crc, read_scalars


def test_the_checksum_is_crc_32c() -> None:
    crc = 0xE3069283  # of "123456789", the published check value
    assert _masked_crc(b"123456789") == ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8) & 0xFFFFFFFF
    assert _masked_crc(b"\x00" * 31 + b"x") == masked_crc(b"\x00" * 31 + b"x")


def test_what_the_real_package_wrote_is_read(tmp_path: Path) -> None:
    writer_module = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    writer = writer_module.EventFileWriter(str(tmp_path))
    for step in (1, 2, 300):
        value = [Summary.Value(tag="a/b", simple_value=step / 3), Summary.Value(tag="c", simple_value=-1.5)]
        writer.add_event(Event(wall_time=1000.0 + step, step=step, summary=Summary(value=value)))
    writer.close()
    notes: list[str] = []
    found = read_scalars(sorted(tmp_path.iterdir()), notes)
    assert [*found] == [1, 2, 300]
    assert found[300].wall_time == 1300.0
    assert found[300].values == {"a/b": 100.0, "c": -1.5}
    assert found[1].values["a/b"] == pytest.approx(1 / 3, abs=1e-7)  # the file holds float32
    assert not notes


def test_what_torch_s_writer_wrote_is_read(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    writer_module = pytest.importorskip("torch.utils.tensorboard")
    writer = writer_module.SummaryWriter(str(tmp_path))
    writer.add_scalar("train/x", 0.25, 7)
    writer.add_text("train/text", "not a number", 7)
    writer.close()
    found = read_scalars(sorted(tmp_path.iterdir()), [])
    assert found[7].values == {"train/x": 0.25}


@pytest.mark.parametrize("cut", [1, 9, 15, 30])
def test_a_record_that_is_still_being_written_is_left_out_and_said(tmp_path: Path, cut: int) -> None:
    path = events(tmp_path / "tfevents", [(1.0, 1, {"x": 1.0})])
    path.write_bytes(path.read_bytes() + event(2.0, 2, {"x": 2.0})[:cut])
    notes: list[str] = []
    assert [*read_scalars([path], notes)] == [1]
    assert "cut" in notes[0]


def test_a_resumed_run_keeps_the_later_steps_whatever_the_files_are_called(tmp_path: Path) -> None:
    old = events(tmp_path / "z.tfevents", [(float(step), step, {"x": 1.0, "old": 1.0}) for step in range(1, 6)])
    new = events(tmp_path / "a.tfevents", [(10.0 + step, step, {"x": 2.0}) for step in (3, 4)])
    found = read_scalars([new, old], [])
    assert {step: one.values for step, one in found.items()} == {
        1: {"x": 1.0, "old": 1.0},
        2: {"x": 1.0, "old": 1.0},
        3: {"x": 2.0},
        4: {"x": 2.0},
    }


def test_a_file_that_is_something_else_or_damaged_is_refused_with_the_byte(tmp_path: Path) -> None:
    other = tmp_path / "tfevents"
    other.write_bytes(b"this is no event file at all")
    with pytest.raises(ConfigurationError, match=r"isn't a TensorBoard event file.*byte 0"):
        read_scalars([other], [])
    first = event(1.0, 1, {"x": 1.0})
    second = bytearray(event(2.0, 2, {"x": 2.0}))
    second[2] ^= 1
    other.write_bytes(first + bytes(second))
    with pytest.raises(ConfigurationError, match=f"byte {len(first)}"):
        read_scalars([other], [])
