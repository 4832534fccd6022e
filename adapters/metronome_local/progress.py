"""What a run shows and writes: a line a period, a live status line, JSONL and TensorBoard."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.status import Status

from metronome.contracts import RolloutSource


class Progress:
    """Prints to the terminal and appends to the run folder's ``metrics.jsonl``, ``groups.jsonl``, TensorBoard.

    ``describe`` tells what the workers do; the status line says what each side waits for.
    """

    def __init__(self, folder: Path, console: Console, periods: int, resumed_at: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._console, self._periods = folder, console, periods
        self.describe = lambda: ""
        self._phase_told = 0.0
        self._status: Status | None = None
        for name in ("metrics.jsonl", "groups.jsonl"):
            _truncate(folder / name, resumed_at or 0)
        self._metrics = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._groups = (folder / "groups.jsonl").open("a", encoding="utf-8")
        self._board = _summary_writer(folder / "tensorboard", resumed_at)

    def say(self, text: str) -> None:
        """Prints one line."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def phase(self, period: int, what: str) -> None:
        """Shows on the status line what the trainer and the workers do; at most ten times a second."""
        now = time.monotonic()
        if not self._console.is_terminal or now - self._phase_told < 0.1:
            return
        self._phase_told = now
        if self._status is None:
            self._status = self._console.status("")
            self._status.start()
        self._status.update(f"period {period + 1}/{self._periods}: {what}; {self.describe()}")

    def period(self, record: dict[str, Any], trained: list[dict[str, Any]]) -> None:
        """Prints and writes one period."""
        staleness = record.get("loss/staleness_max")
        self.say(
            f"{record['period']:4d}/{self._periods}  reward {record['reward']:.3f}  exact {record['exact']:.3f}  "
            f"G {record['group_size']}x{record['prompts']}  {record['seconds']:.1f} s "
            f"(waiting {record['seconds_waiting']:.1f})  {record['tpspd']:.0f} tok/s/dev  "
            f"shared {record['tokens_separate'] / max(1, record['tokens_computed']):.2f}x"
            + ("" if staleness is None else f"  staleness {staleness:.0f}")
        )
        if record.get("group/switched"):
            self.say(f"      {record['group/explanation']}")
        self._write(self._metrics, record)
        for group in trained:
            self._write(self._groups, group)
        for name, value in record.items():
            if isinstance(value, int | float):
                self._board.add_scalar(name, value, record["period"])

    def evaluation(self, period: int, accuracy: float, count: int) -> None:
        """Prints and writes the held-out accuracy."""
        self.say(f"      held-out accuracy {accuracy:.3f} on {count} prompts after period {period}")
        self._write(self._metrics, {"period": period, "held_out_accuracy": accuracy, "held_out_prompts": count})
        self._board.add_scalar("held_out_accuracy", accuracy, period)

    def close(self) -> None:
        """Ends the status line and the files."""
        if self._status is not None:
            self._status.stop()
        self._metrics.close()
        self._groups.close()
        self._board.close()

    @staticmethod
    def _write(file: Any, record: dict[str, Any]) -> None:
        file.write(json.dumps(record) + "\n")
        file.flush()


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The records of a JSONL file; a last line cut by a kill is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def _truncate(path: Path, period: int) -> None:
    """Forgets what a killed run wrote after the checkpoint that is resumed."""
    kept = [record for record in read_jsonl(path) if record["period"] <= period]
    path.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")


def _summary_writer(folder: Path, resumed_at: int | None) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=None if resumed_at is None else resumed_at + 1)


def memory_line(pool_peak: float, source: RolloutSource) -> str:
    """Peak memory of trainer and workers, for the end of a run."""
    from metronome_local.worker import peak_memory

    return (
        f"peak memory: trainer {peak_memory():.0f} MiB, largest worker {pool_peak:.0f} MiB "
        f"(both count the shared weights); rollout source {source.name}"
    )
