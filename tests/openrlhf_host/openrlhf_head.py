"""A Ray for several runs, on ports that are free, in a folder of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import openrlhf_session
import psutil

from metronome_openrlhf.cpu.cluster import PRETENDED

_PORTS = (
    "--port",
    "--node-manager-port",
    "--object-manager-port",
    "--ray-client-server-port",
    "--metrics-export-port",
    "--dashboard-port",
    "--dashboard-agent-grpc-port",
    "--dashboard-agent-listen-port",
    "--runtime-env-agent-port",
)
_RAY = {
    "RAY_AUTH_MODE": "disabled",  # else Ray writes a token into the home folder
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_raylet_start_wait_time_s": "300",
}
_TRIES = 3


def environment() -> dict[str, str]:
    """The variables of a head and its workers, and of a run that starts its own Ray."""
    kept = {name: value for name, value in os.environ.items() if name not in ("CUDA_VISIBLE_DEVICES", "RAY_ADDRESS")}
    return kept | openrlhf_session.VARIABLES


@contextmanager
def folder() -> Iterator[Path]:
    """A folder for Ray, with a short name: its sockets lie below it, and their paths may have 107 characters."""
    found = Path(tempfile.mkdtemp(prefix="mray"))
    try:
        yield found
    finally:
        shutil.rmtree(found, ignore_errors=True)


@contextmanager
def head() -> Iterator[str]:
    """The address of a Ray that knows as many GPUs as the CPU room pretends; it is ended behind the ``with``."""
    for left in reversed(range(_TRIES)):
        with folder() as place:
            log = place / "head.log"
            ports = _free_ports(len(_PORTS))
            with log.open("wb") as out:
                process = subprocess.Popen(
                    [
                        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
                        *("--node-ip-address=127.0.0.1", "--include-dashboard=false", "--disable-usage-stats"),
                        *(f"--num-cpus={PRETENDED}", f"--num-gpus={PRETENDED}", "--object-store-memory=400000000"),
                        f"--temp-dir={place / 'ray'}",
                        *(f"{name}={port}" for name, port in zip(_PORTS, ports, strict=True)),
                    ],
                    env=environment() | _RAY,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            try:
                if until(lambda log=log: "Ray runtime started" in log.read_text(errors="replace"), 180, process):
                    yield f"127.0.0.1:{ports[0]}"
                    return
                said = log.read_text(errors="replace")[-2000:]
            finally:
                end(process.pid)
        if not left:
            raise RuntimeError(f"Ray's head didn't start in {_TRIES} attempts; the last one said:\n{said}")


def until(true, seconds, process) -> bool:
    """Whether ``true()`` came before ``seconds`` passed or the process ended."""
    last = time.monotonic() + seconds
    while time.monotonic() < last and process.poll() is None:
        if true():
            return True
        time.sleep(0.2)
    return False


def tree(pid: int) -> list[psutil.Process]:
    """The process and what it started, and that started."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def end(pid: int) -> None:
    """Ends the process and what it started."""
    processes = tree(pid)
    for how in ("terminate", "kill"):
        for process in processes:
            try:
                getattr(process, how)()
            except psutil.NoSuchProcess:
                continue
        _, processes = psutil.wait_procs(processes, timeout=15)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
