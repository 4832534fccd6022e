"""The trainer's side of the rollout workers: dispatch, publication, replacement of the dead, and no silent wait."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

from metronome.errors import EqualityViolated, MetronomeError, WaitTimeout, WorkerFailed
from metronome.periodic.stream import Aborted
from metronome_local.rollouts import Group
from metronome_local.weights import SharedWeights
from metronome_local.worker import Job, WorkerConfig, run_worker


@dataclass
class _Worker:
    number: int
    process: Any
    connection: Connection
    ready: bool = False
    paused: bool = True
    applied: int | None = None
    report: dict[str, float] = field(default_factory=dict)
    peak_memory: float = 0.0


@dataclass
class _Pending:
    job: Job
    worker: int
    future: Future[Group]
    dispatched: float


class RolloutPool:
    """N rollout workers behind futures.

    A group goes to the worker with the fewest groups. A worker that dies is replaced and its groups go out again
    at the same version with the same seeds; one that reports an error of its own stops the run with that error.
    """

    def __init__(
        self,
        weights: SharedWeights,
        configs: list[WorkerConfig],
        *,
        fingerprint_dtype: Any,
        timeout: float,
        max_restarts: int,
    ) -> None:
        import torch.multiprocessing

        self._context = torch.multiprocessing.get_context("spawn")
        self._weights, self._configs, self._dtype = weights, configs, fingerprint_dtype
        self._timeout, self._restarts_left = timeout, max_restarts
        self._changed = threading.Condition(threading.RLock())
        self._pending: dict[int, _Pending] = {}
        self._resolved: list[tuple[Future[Group], Group | Exception]] = []
        self._next_id = 0
        self._phase = "applying"  # "pausing" from an optimiser step to the moment the weights are written
        self._failed: MetronomeError | None = None
        self._closing = False
        self.version: int | None = None
        self.fingerprint = ""
        self.restarts = 0
        self._wake_read, self._wake_write = os.pipe()
        self._workers = [self._spawn(number) for number in range(len(configs))]
        self._collector = threading.Thread(target=self._collect, name="metronome-collector", daemon=True)
        self._collector.start()

    def generate(self, prompt: Any, size: int, greedy: bool = False) -> Future[Group]:
        """A future of the group of ``size`` rollouts; Aborted if a publication aborted it."""
        with self._changed:
            job = Job(self._next_id, prompt, size, greedy)
            self._next_id += 1
            future: Future[Group] = Future()
            if self._failed:
                future.set_exception(self._failed)
                return future
            self._dispatch(job, future)
            return future

    def publish(self, version: int, write: Callable[[], None], in_flight: str = "finish") -> str:
        """Writes the weights while every worker stands still; returns when all have applied ``version``.

        Returns the fingerprint. Raises EqualityViolated if a worker holds other weights than those published.
        """
        with self._changed:
            self._phase = "pausing"
            for worker in self._workers:
                if worker.ready and not worker.paused:
                    self._send(worker, ("pause", in_flight))
            self._wait(lambda: all(worker.paused for worker in self._workers), f"every worker to pause ({in_flight})")
            write()
            self.version, self.fingerprint = version, self._weights.fingerprint(self._dtype)
            self._phase = "applying"
            for worker in self._workers:
                if worker.ready:
                    self._apply(worker)
            self._wait(
                lambda: all(worker.applied == version for worker in self._workers),
                f"every worker to apply version {version}",
            )
            return self.fingerprint

    def hold(self) -> None:
        """Says that the weights are about to change: a worker that starts now waits for the next publication."""
        with self._changed:
            self._phase = "pausing"

    def describe(self) -> str:
        """What each worker does, for messages and the progress line."""
        with self._changed:
            return "; ".join(self._describe(worker) for worker in self._workers)

    def peak_memory(self) -> float:
        """The largest worker's peak resident memory in MiB, shared weights included."""
        with self._changed:
            return max(worker.peak_memory for worker in self._workers)

    def process_ids(self) -> list[int]:
        """Process ids of the workers."""
        with self._changed:
            return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """Ends every worker and the collector; always returns."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            for worker in self._workers:
                self._send(worker, ("stop",))
        deadline = time.monotonic() + 10
        for worker in self._workers:
            worker.process.join(max(0.1, deadline - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join(5)
        os.write(self._wake_write, b"x")
        self._collector.join(5)
        for pending in self._pending.values():
            pending.future.cancel()
        for worker in self._workers:
            worker.connection.close()

    # --- dispatch -------------------------------------------------------------------------------

    def _dispatch(self, job: Job, future: Future[Group]) -> None:
        load = {worker.number: 0 for worker in self._workers}
        for pending in self._pending.values():
            load[pending.worker] += 1
        number = min(load, key=lambda key: (load[key], key))
        self._pending[job.id] = _Pending(job, number, future, time.monotonic())
        if self._workers[number].ready:
            self._send(self._workers[number], ("generate", job))

    def _send(self, worker: _Worker, message: tuple[Any, ...]) -> None:
        try:
            worker.connection.send(message)
        except (BrokenPipeError, ConnectionResetError, OSError):
            return  # it died; the collector sees its sentinel and replaces it

    def _apply(self, worker: _Worker) -> None:
        """Sends the weights; from here on a publication must pause it first, acknowledged or not."""
        worker.paused = False
        self._send(worker, ("weights", self.version))

    def _spawn(self, number: int) -> _Worker:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=run_worker,
            args=(theirs, self._weights, self._configs[number]),
            name=f"metronome-rollout-{number}",
            daemon=True,
        )
        # A terminal's Ctrl-C reaches the whole group: until the child ignores it, it is blocked. The tracker
        # comes first, for its own start would unblock it.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        theirs.close()  # so that a dead worker ends our reads
        return _Worker(number, process, ours)

    # --- collection -----------------------------------------------------------------------------

    def _collect(self) -> None:
        while True:
            with self._changed:
                watched: list[Any] = [self._wake_read]
                for worker in self._workers:
                    watched += [worker.connection, worker.process.sentinel]
            wait(watched, timeout=1.0)
            with self._changed:
                for number in range(len(self._workers)):
                    self._drain(self._workers[number])
                resolved, self._resolved = self._resolved, []
                over = self._closing and not any(worker.process.is_alive() for worker in self._workers)
            # Outside the lock: a future's callbacks belong to others, who may hold locks of their own.
            for future, result in resolved:
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)
            if over:
                return

    def _drain(self, worker: _Worker) -> None:
        alive = worker.process.is_alive()  # asked before reading: nothing can arrive after it was dead
        try:
            while worker.connection.poll():
                self._receive(worker, worker.connection.recv())
        except (EOFError, ConnectionResetError, OSError):
            alive = alive and worker.process.is_alive()
        if not alive and not self._closing and self._failed is None:
            self._replace(worker)
        self._changed.notify_all()

    def _receive(self, worker: _Worker, message: tuple[Any, ...]) -> None:
        kind, rest = message[0], message[1:]
        if kind == "group":
            self._finish(worker, *rest)
        elif kind == "report":
            worker.report = rest[0]
        elif kind == "ready":
            worker.ready, worker.peak_memory = True, rest[0]
            for pending in self._pending.values():
                if pending.worker == worker.number:
                    self._send(worker, ("generate", pending.job))
            if self._phase == "applying" and self.version is not None:
                self._apply(worker)
        elif kind == "paused":
            worker.paused = True
        elif kind == "applied":
            self._applied(worker, *rest)
        elif kind == "aborted":
            given_back = self._pending.pop(rest[0], None)
            if given_back is not None:
                self._resolved.append((given_back.future, Aborted()))
        elif kind == "bye":
            worker.peak_memory = rest[0]
        elif kind == "error":
            self._fail(rest[0])

    def _finish(self, worker: _Worker, identity: int, rollouts: Any, end: float) -> None:
        pending = self._pending.pop(identity, None)
        if pending is None:  # it had been given up: another worker's error has ended the run
            return
        group = Group(pending.job.prompt, pending.job.size, rollouts, pending.dispatched, end, worker.number)
        self._resolved.append((pending.future, group))

    def _applied(self, worker: _Worker, version: int, fingerprint: str) -> None:
        settled = self._phase == "applying"  # else the optimiser may have been at work since
        if settled and version == self.version and fingerprint != self.fingerprint:
            self._fail(
                EqualityViolated(
                    f"rollout worker {worker.number} holds other weights than version {version}",
                    found=f"fingerprint {fingerprint}, published {self.fingerprint}",
                    where="publication",
                )
            )
        worker.applied = version

    def _replace(self, worker: _Worker) -> None:
        lost = [pending.job.prompt.index for pending in self._pending.values() if pending.worker == worker.number]
        code = worker.process.exitcode
        if self._restarts_left == 0:
            self._fail(
                WorkerFailed(
                    f"rollout worker {worker.number} died and no restart is left",
                    found=f"exit code {code}, running prompt indices {lost}",
                    where="machine.max_restarts",
                    remedy="look for an out-of-memory kill, or raise machine.max_restarts",
                )
            )
            return
        self._restarts_left -= 1
        self.restarts += 1
        try:
            replacement = self._spawn(worker.number)
        except Exception as error:  # no memory, no process ids: an error of this thread would be lost
            self._fail(
                WorkerFailed(
                    f"rollout worker {worker.number} died and can't be replaced: {type(error).__name__}: {error}",
                    found=f"exit code {code}, running prompt indices {lost}",
                    where="machine.workers",
                    remedy="free memory or processes, then --resume",
                )
            )
            return
        worker.connection.close()
        self._workers[worker.number] = replacement

    def _fail(self, error: MetronomeError) -> None:
        self._failed = self._failed or error  # the first one is the reason
        pending, self._pending = self._pending, {}
        self._resolved += [(one.future, self._failed) for one in pending.values()]

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self._timeout
        while not done():
            if self._failed:
                raise self._failed
            left = deadline - time.monotonic()
            if left <= 0:
                raise WaitTimeout(
                    f"waited {self._timeout:g} s for {what}",
                    found=self.describe(),
                    where="machine.timeout",
                    remedy="raise machine.timeout, or in_flight: resume",
                )
            self._changed.wait(min(left, 1.0))

    def _describe(self, worker: _Worker) -> str:
        groups = sum(pending.worker == worker.number for pending in self._pending.values())
        if not worker.process.is_alive():
            state = "dead"
        elif not worker.ready:
            state = "starting"
        elif worker.paused:
            state = "paused"
        else:
            speed, running = (worker.report.get(key, 0.0) for key in ("tokens_per_second", "sequences"))
            at_work = f"{groups} groups, {running:.0f} sequences at {speed:.0f} tokens/s"
            state = at_work if groups else "idle, waits for prompts"
        return f"worker {worker.number}: {state}"
