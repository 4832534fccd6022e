"""``metronome selftest``: every backend of a device on the owner's card, as a table and a JSON for an issue.

Checked are outputs and gradients against float64 arithmetic; told are repeatability and the time against
separate rows. GPU and NPU backends haven't been run on a card by us: this is how an owner does.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from metronome import __version__
from metronome.contracts import AttentionBackend
from metronome.device import resolve_device
from metronome.errors import ConfigurationError, MetronomeError, nearest
from metronome.shared_prompt import select
from metronome.shared_prompt.selftest_cases import DTYPES, TOLERANCE, Case, cases, check, timing

_BY_NAME = {"npu": ("npu_cascade",)}  # what serves a device, but is never picked
_PACKAGES = ("torch", "torch_npu", "flash-attn", "triton", "transformers", "numpy")


def selftest(
    device: str = "auto",
    long: bool = False,
    backend: str | None = None,
    report: str | None = None,
    find: Callable[[str], AttentionBackend] | None = None,
) -> int:
    """Runs the cases on ``device``, prints a table, and returns 0 if all pass, else 1.

    Args:
        device: ``cpu``, ``cuda``, ``npu`` or ``auto``.
        long: also at the lengths of real rows.
        backend: only this backend; None: all of the device.
        report: file to write the figures to, as JSON.
        find: gives the backend of a name; None: ours.

    Raises ConfigurationError for a device that torch doesn't see, an unknown backend, one that serves no case
    on this device, or a report that can't be written.
    """
    if device in ("auto", "npu"):
        _load_npu()
    kind = resolve_device(device, "metronome selftest --device").kind
    names = _names(kind, backend)
    if report is not None:
        _write(report, {})
    start, threads = time.perf_counter(), torch.get_num_threads()
    if kind == "cpu":  # so that times don't depend on what else the cores do
        torch.set_num_threads(1)
    try:
        found = _run(names, kind, long, find or select.backend_named)
    finally:
        torch.set_num_threads(threads)
    if not found["cases"]:
        raise ConfigurationError(
            f"no case could be run on {kind}: {'; '.join(sorted({one['reason'] for one in found['refused']}))}",
            found=", ".join(names),
            where="metronome selftest",
            remedy=f"another --backend: {', '.join(_names(kind, None))}",
        )
    failed = [one for one in found["cases"] if not one["passed"]]
    result = {
        "passed": not failed,
        "device": {"kind": kind, "name": _device_name(kind)},
        "versions": _versions(),
        "long": long,
        "clock": "process CPU seconds, one thread" if kind == "cpu" else "wall seconds, device synchronised",
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "tolerance": {dtype: TOLERANCE[dtype] for dtype in DTYPES[kind]},
        "seconds": time.perf_counter() - start,
        **found,
    }
    if report is not None:
        _write(report, result)
    _print(result)
    return 1 if failed else 0


def _run(
    names: Sequence[str], device: str, long: bool, find: Callable[[str], AttentionBackend]
) -> dict[str, list[dict[str, Any]]]:
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    every = list(cases(device, long))
    columns = TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn()
    ran: list[dict[str, Any]] = []
    refused: list[dict[str, Any]] = []
    timed: list[dict[str, Any]] = []
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(names) * len(DTYPES[device]) * len(every))
        for name in names:
            try:
                one = find(name)
            except (ImportError, MetronomeError) as error:
                refused.append({"backend": name, "dtype": None, "case": "all", "reason": f"can't be loaded: {error}"})
                progress.advance(task, len(DTYPES[device]) * len(every))
                continue
            for dtype in DTYPES[device]:
                progress.update(task, description=f"{name} {dtype}")
                served = False
                for case in every:
                    where = {"backend": name, "dtype": dtype, "case": case.name}
                    reason = one.supports(case.need(device, dtype)) or case.too_dense(name)
                    if reason is None:
                        served = True
                        ran.append({**where, "kind": case.kind, **_checked(one, case, device, dtype)})
                    else:
                        refused.append({**where, "reason": reason})
                    progress.advance(task)
                if served and not (name == "reference" and long):
                    timed.append({"backend": name, "dtype": dtype, **_timed(one, device, dtype, long)})
    return {"cases": ran, "refused": refused, "timing": timed}


def _checked(backend: AttentionBackend, case: Case, device: str, dtype: str) -> dict[str, Any]:
    """``check``, with whatever the backend raises as a failure: the other cases go on."""
    try:
        found = check(backend, case, device, dtype)
    except Exception as fault:  # a kernel may raise anything
        return {"passed": False, "largest": {}, "same_bits": None, "error": f"{type(fault).__name__}: {fault}"}
    if torch.are_deterministic_algorithms_enabled() and not found["same_bits"]:
        return {**found, "passed": False, "error": "two calls gave different bits, deterministic algorithms are asked"}
    worst = max(found["largest"], key=lambda name: _rank(found["largest"][name]))
    error = None if found["passed"] else f"{worst} is off by {found['largest'][worst]:.1e} of its largest value"
    return {**found, "error": error}


def _timed(backend: AttentionBackend, device: str, dtype: str, long: bool) -> dict[str, Any]:
    try:
        return {**timing(backend, device, dtype, long), "error": None}
    except Exception as error:  # out of memory, most likely: the check's own cases tell faults
        return {"ratio": None, "error": f"{type(error).__name__}: {error}"}


def _names(device: str, backend: str | None) -> tuple[str, ...]:
    every = (*select._PREFERENCE[device], *_BY_NAME.get(device, ()))
    if backend is None:
        return every
    if backend not in every:
        raise ConfigurationError(
            f"no backend of that name on {device}",
            found=backend,
            where="metronome selftest --backend",
            remedy=nearest(backend, every),
        )
    return (backend,)


def _load_npu() -> None:
    """torch sees an NPU only once torch_npu is imported."""
    try:
        import_module("torch_npu")
    except Exception:  # not installed, or without its driver: resolve_device says that there is no NPU
        return


def _device_name(kind: str) -> str:
    if kind != "cpu":
        return str(getattr(torch, kind).get_device_name())
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"metronome": __version__, "python": platform.python_version()}
    found["platform"] = platform.platform()
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _write(path: str, result: dict[str, Any]) -> None:
    try:
        Path(path).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"the report can't be written: {error.strerror}",
            found=path,
            where="metronome selftest --json",
            remedy="a file in a folder that exists",
        ) from error


def _rank(difference: float) -> float:
    """NaN above everything."""
    return float("inf") if difference != difference else difference


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False)
    console.print(f"{result['device']['kind']}: {result['device']['name']}, torch {result['versions']['torch']}")
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in ("backend", "dtype", "lengths", "passed", "largest error", "same bits", "faster than rows"):
        table.add_column(column)
    timing_of = {(one["backend"], one["dtype"]): one for one in result["timing"]}
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for one in result["cases"]:
        groups.setdefault((one["backend"], one["dtype"], one["kind"]), []).append(one)
    for (backend, dtype, kind), ran in groups.items():
        errors = [_rank(value) for one in ran for value in one["largest"].values()]
        repeated = [one["same_bits"] for one in ran if one["same_bits"] is not None]
        timed = timing_of.pop((backend, dtype), None)
        table.add_row(
            backend,
            dtype,
            kind,
            f"{sum(one['passed'] for one in ran)} of {len(ran)}",
            f"{max(errors):.1e}" if errors else "-",
            "-" if not repeated else "yes" if all(repeated) else f"{sum(repeated)} of {len(repeated)}",
            "" if timed is None else f"{timed['ratio']:.2f}x" if timed["ratio"] else "not timed",
        )
    console.print(table)
    shapes = {tuple(one["shape"]) for one in result["timing"] if one["ratio"]}
    for prompt, count, length in sorted(shapes):
        console.print(f"timed at a prompt of {prompt} and {count} responses of {length}, forward and backward")
    for line in _refusals(result["refused"]):
        console.print(line)
    for one in result["cases"]:
        if not one["passed"]:
            console.print(f"FAILED {one['backend']}, {one['dtype']}, {one['case']}: {one['error']}")
    count = sum(not one["passed"] for one in result["cases"])
    total, seconds = len(result["cases"]), result["seconds"]
    console.print(f"{total - count} of {total} cases passed in {seconds:.0f} s")


def _refusals(refused: Sequence[dict[str, Any]]) -> list[str]:
    """One line for each backend and reason."""
    counts: dict[tuple[str, str], int] = {}
    for one in refused:
        counts[one["backend"], one["reason"]] = counts.get((one["backend"], one["reason"]), 0) + 1
    return [f"not run: {backend}, {number} cases: {reason}" for (backend, reason), number in counts.items()]
