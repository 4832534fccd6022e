"""A rollout worker: a process that generates groups, pauses for publications, and says what it does."""

from __future__ import annotations

import random
import resource
import signal
import time
import traceback
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from metronome.errors import ConfigurationError, MetronomeError, WorkerFailed
from metronome_local.recipe import Model, Sampling
from metronome_local.rollouts import Prompt, Request, RolloutGenerator, Row, single_turn

_REPORT_EVERY = 1.0  # seconds between two reports of progress


@dataclass(frozen=True)
class WorkerConfig:
    """What a worker is told once, at its start."""

    model: Model
    sampling: Sampling
    device: str
    threads: int
    cores: tuple[int, ...] | None
    seed: int


@dataclass(frozen=True)
class Job:
    """One group to generate; its random numbers follow the prompt's index, never its arrival."""

    id: int
    prompt: Prompt
    size: int
    greedy: bool = False


@dataclass
class _Active:
    job: Job
    members: dict[int, RolloutGenerator] = field(default_factory=dict)
    rngs: dict[int, random.Random] = field(default_factory=dict)
    rows: dict[int, list[Row]] = field(default_factory=dict)


def peak_memory() -> float:
    """Peak resident memory of this process in MiB, shared weights included.

    From /proc where there is one: ru_maxrss of a spawned process starts at its parent's.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run_worker(connection: Connection, weights: Any, config: WorkerConfig) -> None:
    """The process's main function: serves the connection until it is told to stop or the trainer is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer decides how a run ends
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        _Worker(connection, weights, config).serve()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the trainer is gone
    except MetronomeError as error:
        connection.send(("error", error))
    except BaseException as error:
        where = traceback.format_exc().strip().splitlines()
        failed = WorkerFailed(
            f"a rollout worker raised {type(error).__name__}: {error}",
            where=" | ".join(line.strip() for line in where[-4:]),
        )
        connection.send(("error", failed))


class _Worker:
    def __init__(self, connection: Connection, weights: Any, config: WorkerConfig) -> None:
        import os

        import torch

        from metronome_local.engine import Engine
        from metronome_local.importing import function_at
        from metronome_local.models import eos_ids, load_tokenizer, policy_model

        if config.cores is not None:
            os.sched_setaffinity(0, config.cores)
        torch.set_num_threads(config.threads)
        self.connection, self.weights, self.config = connection, weights, config
        self.tokenizer = load_tokenizer(config.model.name)
        path = config.sampling.rollout
        self.rollout = function_at(path, "sampling.rollout") if path else single_turn
        self.model = policy_model(config.model).requires_grad_(False)
        self.aliased = config.device == "cpu" and config.model.dtype == "float32"
        if self.aliased:
            weights.alias(self.model)
        else:
            self.model.to(device=config.device, dtype=getattr(torch, config.model.dtype))
        ids = eos_ids(self.model, self.tokenizer)
        self.engine = Engine(self.model, config.sampling.slots, ids, config.sampling.temperature)
        self.waiting: deque[Job] = deque()
        self.active: dict[int, _Active] = {}
        self.paused, self.pausing = True, False
        self.told, self.sampled = time.monotonic(), 0

    def serve(self) -> None:
        self.connection.send(("ready", peak_memory()))
        while True:
            working = not self.paused and (self.engine.busy or (self.waiting and not self.pausing))
            while self.connection.poll(0 if working else _REPORT_EVERY):
                if not self._handle(self.connection.recv()):
                    self.connection.send(("bye", peak_memory()))
                    return
                working = not self.paused and (self.engine.busy or bool(self.waiting))
                if not working:
                    break
            if working:
                self._work()
            if self.pausing and not self.active:
                self.paused, self.pausing = True, False
                self.connection.send(("paused",))
            self._report()

    def _handle(self, message: tuple[Any, ...]) -> bool:
        kind = message[0]
        if kind == "generate":
            self.waiting.append(message[1])
        elif kind == "pause":
            self._pause(message[1])
        elif kind == "weights":
            self._apply(message[1])
        elif kind == "stop":
            return False
        else:
            raise AssertionError(f"unknown message {kind!r}")
        return True

    def _pause(self, in_flight: str) -> None:
        """finish: what is running ends first; abort: it is given back; resume: it is kept as it stands."""
        if in_flight == "abort":
            for identity in list(self.active):
                self._forget(identity)
                self.connection.send(("aborted", identity))
        if in_flight == "resume" or not self.active:
            self.paused = True
            self.connection.send(("paused",))
        else:
            self.pausing = True

    def _forget(self, identity: int) -> None:
        active = self.active.pop(identity)
        self.engine.abort({(identity, member) for member in range(active.job.size)})
        for generator in active.members.values():
            generator.close()

    def _apply(self, version: int) -> None:
        if not self.aliased:
            self.weights.read(self.model)
        self.engine.renew(version)
        self.paused = False
        self.connection.send(("applied", version, self.weights.fingerprint_of(self.model)))

    def _work(self) -> None:
        slots = self.config.sampling.slots
        while self.waiting and not self.pausing and self.engine.running + self.engine.queued < slots:
            self._start(self.waiting.popleft())
        for key, sampled in self.engine.step():
            identity, member = key
            self._advance(identity, member, sampled)

    def _start(self, job: Job) -> None:
        active = self.active[job.id] = _Active(job)
        for member in range(job.size):
            active.rngs[member] = random.Random(f"{self.config.seed} {job.prompt.index} {member}")
            self._advance(job.id, member, None)

    def _advance(self, identity: int, member: int, sampled: Any) -> None:
        active = self.active[identity]
        try:
            if member not in active.members:
                active.members[member] = self.rollout(active.job.prompt, self.tokenizer)
            request = active.members[member].send(sampled)
        except StopIteration as stop:
            active.rows[member] = self._checked(stop.value, active.job)
        except Exception as error:  # the user's rollout function: whatever it raises becomes one clear error
            raise ConfigurationError(
                f"the rollout function raised {type(error).__name__}: {error}",
                found=active.job.prompt.index,
                where=self.config.sampling.rollout,
                remedy="mend the function; the value found is the prompt's index",
            ) from error
        else:
            self._submit(active, member, request)
        if len(active.rows) == active.job.size:
            rollouts = [active.rows[k] for k in range(active.job.size)]
            self.connection.send(("group", identity, rollouts, time.monotonic()))
            del self.active[identity]

    def _submit(self, active: _Active, member: int, request: Request) -> None:
        from metronome_local.engine import Continuation

        if not isinstance(request, Request) or not request.ids or not self._known(request.ids):
            raise ConfigurationError(
                "the rollout function must yield a Request with at least one token of context, all in the vocabulary",
                found=type(request).__name__,
                where=f"{self.config.sampling.rollout}, prompt index {active.job.prompt.index}",
                remedy="sampled = yield Request(row.ids)",
            )
        sampling, rng = self.config.sampling, active.rngs[member]
        limit = min(request.max_tokens or sampling.max_tokens, sampling.max_tokens)
        if sampling.fixed_lengths is not None and not active.job.greedy:
            limit = rng.randint(*sampling.fixed_lengths)
        self.engine.submit(
            Continuation(
                key=(active.job.id, member),
                context=tuple(request.ids),
                max_tokens=limit,
                rng=rng,
                greedy=active.job.greedy,
                ignore_eos=sampling.fixed_lengths is not None and not active.job.greedy,
            )
        )

    def _checked(self, rows: Any, job: Job) -> list[Row]:
        if not (isinstance(rows, list) and rows and all(_is_whole(row) and self._known(row.ids) for row in rows)):
            raise ConfigurationError(
                "the rollout function must return rows with a prompt and at least one sampled token each, "
                "all in the vocabulary",
                found=f"{len(rows)} rows" if isinstance(rows, list) else type(rows).__name__,
                where=f"{self.config.sampling.rollout}, prompt index {job.prompt.index}",
                remedy="row = Row(list(prompt.ids)), row.add_sampled(sampled), return [row]",
            )
        return rows

    def _known(self, ids: Any) -> bool:
        size = self.model.get_input_embeddings().num_embeddings
        return all(isinstance(token, int) and 0 <= token < size for token in ids)

    def _report(self) -> None:
        now = time.monotonic()
        if now - self.told >= _REPORT_EVERY:
            speed = (self.engine.sampled - self.sampled) / (now - self.told)
            self.told, self.sampled = now, self.engine.sampled
            report = {"sequences": self.engine.running, "tokens_per_second": speed}
            self.connection.send(("report", report))


def _is_whole(row: Any) -> bool:
    """Lists throughout: a prompt, a sampled token, and every list of the response of one length."""
    return (
        isinstance(row, Row)
        and all(isinstance(values, list) for values in (row.prompt, row.response, row.trained))
        and bool(row.prompt)
        and any(row.trained)
        and len({len(values) for values in (row.response, row.trained, row.log_probs, row.versions)}) == 1
    )
