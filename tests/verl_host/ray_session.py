"""One Ray head for every end-to-end run of a test session, and runs of verl's unmodified ``main_ppo`` on it.

Ray's own start inside ``main_ppo`` gives up after 30 seconds, which a busy machine exceeds, so the head is started
once, with ports that are free now and fixed from then on, and tried again when it doesn't come up. Only processes
that this module started are ever stopped.
"""

from __future__ import annotations

import atexit
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil

ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HYDRA_FULL_ERROR": "1",
    "RAY_DEDUP_LOGS": "0",
    "RAY_AUTH_MODE": "disabled",  # else Ray writes a token into the home folder
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_METRICS_COLLECTION": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_memory_monitor_refresh_ms": "0",  # else a machine that is full of other work ends a run of ours
}
PORTS = (
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
Progress = Callable[[str], None]


def quiet(line: str) -> None:
    """No progress."""


def environment() -> dict[str, str]:
    """The variables of the head, and so of every worker, and of the drivers."""
    kept = {name: value for name, value in os.environ.items() if name not in ("CUDA_VISIBLE_DEVICES", "RAY_ADDRESS")}
    return kept | ENVIRONMENT


@dataclass
class RaySession:
    """A running head: its address, its folder, its process, and where progress goes."""

    address: str
    folder: Path
    process: subprocess.Popen[bytes]
    progress: Progress = quiet

    def stop(self) -> None:
        """Ends the head and what it started."""
        processes = _tree(self.process.pid)
        for end in (signal.SIGTERM, signal.SIGKILL):
            for process in processes:
                try:
                    process.send_signal(end)
                except psutil.NoSuchProcess:
                    continue
            _, processes = psutil.wait_procs(processes, timeout=15)
            if not processes:
                break
        shutil.rmtree(self.folder, ignore_errors=True)


_running: list[RaySession] = []


def shared_session(progress: Progress = quiet, gpus: int = 4) -> RaySession:
    """The session of this process, started on the first call and stopped at exit; ``gpus`` are pretended."""
    if not _running:
        _running.append(start(progress, gpus))
        atexit.register(lambda: _running.pop().stop())
    _running[0].progress = progress
    return _running[0]


def start(progress: Progress = quiet, gpus: int = 4, tries: int = 3) -> RaySession:
    """Starts a head; tries again on other ports when it doesn't answer within three minutes."""
    for attempt in range(1, tries + 1):
        progress(f"starting Ray (attempt {attempt} of {tries})")
        # Short: Ray's sockets lie below it, and their paths may have 107 characters.
        folder = Path(tempfile.mkdtemp(prefix="mray"))
        ports = _free_ports(len(PORTS))
        address = f"127.0.0.1:{ports[0]}"
        log = folder / "head.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
                    *("--node-ip-address=127.0.0.1", "--include-dashboard=false", "--disable-usage-stats"),
                    *(f"--num-cpus=32 --num-gpus={gpus} --object-store-memory=300000000".split()),
                    f"--temp-dir={folder / 'ray'}",
                    *(f"{name}={port}" for name, port in zip(PORTS, ports, strict=True)),
                ],
                env=environment(),
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        session = RaySession(address, folder, process, progress)
        begin = time.monotonic()
        if _answers(session, log, timeout=180):
            progress(f"Ray runs at {address} after {time.monotonic() - begin:.0f} s")
            return session
        tail = log.read_text(errors="replace")[-2000:]
        session.stop()
    raise RuntimeError(f"Ray's head didn't start in {tries} attempts; the last one said:\n{tail}")


def _answers(session: RaySession, log: Path, timeout: float) -> bool:
    end = time.monotonic() + timeout
    while time.monotonic() < end and session.process.poll() is None:
        if "Ray runtime started" in log.read_text(errors="replace"):
            return True
        time.sleep(0.2)
    return False


def _free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


class _Meter(threading.Thread):
    """User and system seconds of process trees, sampled every second: Ray's workers leave no sum when they end."""

    def __init__(self, *roots: int) -> None:
        super().__init__(daemon=True)
        self._roots, self._stop_asked = roots, threading.Event()
        self._first: dict[tuple[int, float], float] = {}
        self._last: dict[tuple[int, float], float] = {}

    def run(self) -> None:
        while not self._stop_asked.wait(1):
            self._sample()

    def begin(self) -> None:
        """Counts from now on; what a process that runs already has used before doesn't count."""
        self._sample()
        self._first = dict(self._last)
        self.start()

    def end(self) -> float:
        """The sum since ``begin``."""
        self._stop_asked.set()
        self.join()
        return sum(self._last.values()) - sum(self._first.values())

    def _sample(self) -> None:
        for process in (process for root in self._roots for process in _tree(root)):
            try:
                times = process.cpu_times()
                self._last[process.pid, process.create_time()] = times.user + times.system
            except psutil.NoSuchProcess:
                continue


# ---- main_ppo ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Output:
    """A finished ``main_ppo``: exit code, everything it and its workers printed, the metrics of each step.

    ``cpu_seconds`` is what the driver and all workers used.
    """

    returncode: int
    text: str
    metrics: tuple[dict[str, float], ...]
    wall_seconds: float
    cpu_seconds: float

    def tail(self, lines: int = 60) -> str:
        """The last lines, for an assertion's message."""
        return "\n".join(self.text.splitlines()[-lines:])


_STEP = re.compile(r"(?:^|\s)step:(\d+) - (.+)")
_STAGES = (
    ("ray init kwargs", "the driver is up"),
    ("LLMServerManager:", "the rollout servers are up"),
    ("Training Progress", "training has begun"),
)


def run_main_ppo(
    overrides: Sequence[str],
    session: RaySession,
    *,
    timeout: float = 900,
    variables: Mapping[str, str] | None = None,
) -> Output:
    """Runs ``python -m verl.trainer.main_ppo`` with ``overrides`` on ``session`` and waits for its end.

    ``variables`` reach the driver, and the workers through Ray's runtime environment. A run that exceeds ``timeout``
    seconds is ended with return code -9, its output kept.
    """
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides]
    command += [f"+ray_kwargs.ray_init.address={session.address}", "hydra.run.dir=" + str(session.folder / "hydra")]
    command += [
        f"+ray_kwargs.ray_init.runtime_env.env_vars.{name}='{value}'" for name, value in (variables or {}).items()
    ]
    return run_command(command, session, timeout=timeout, variables=variables)


def run_command(
    command: Sequence[str],
    session: RaySession,
    *,
    timeout: float = 900,
    variables: Mapping[str, str] | None = None,
) -> Output:
    """Runs ``command``, which starts ``main_ppo`` on ``session``, in the session's folder, and waits for its end."""
    begin = time.monotonic()
    driver = subprocess.Popen(
        command,
        env=environment() | dict(variables or {}),
        cwd=session.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    lines: list[str] = []
    metrics: list[dict[str, float]] = []
    seen: set[str] = set()
    late, meter = False, _Meter(session.process.pid, driver.pid)
    meter.begin()
    for line in _lines(driver, begin + timeout):
        if line is None:
            late = True
            break
        lines.append(line)
        for word, stage in _STAGES:
            if word in line and stage not in seen:
                seen.add(stage)
                session.progress(f"{time.monotonic() - begin:5.0f} s  {stage}")
        if found := _STEP.search(line):
            metrics.append(_numbers(found))
            session.progress(f"{time.monotonic() - begin:5.0f} s  step {found[1]} done")
    if late:
        lines.append(f"stopped: it ran longer than {timeout:.0f} s")
        for process in _tree(driver.pid):
            process.kill()
    code = driver.wait(timeout=60)
    wall, cpu = time.monotonic() - begin, meter.end()
    session.progress(f"{wall:5.0f} s  ended with {code}; {cpu:.0f} CPU seconds")
    return Output(-9 if late else code, "\n".join(lines), tuple(metrics), wall, cpu)


def _lines(driver: subprocess.Popen[str], end: float) -> Iterator[str | None]:
    """The driver's lines, then an end; None once when ``end`` passes first."""
    assert driver.stdout is not None
    came: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in driver.stdout:
            came.put(line.rstrip("\n"))
        came.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = came.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            yield None
            return
        if line is None:
            return
        yield line


def _numbers(step: re.Match[str]) -> dict[str, float]:
    found = {"step": float(step[1])}
    for part in step[2].split(" - "):
        name, _, value = part.rpartition(":")
        try:
            found[name] = float(re.sub(r"^np\.\w+\((.*)\)$", r"\1", value.strip()))
        except ValueError:
            continue
    return found
