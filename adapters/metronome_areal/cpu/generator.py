"""A thread that continues rows, a token each per step; rows join, and weights change, between two steps."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import torch

from metronome.decoding.batch import DecodeBatch, Row
from metronome.decoding.weights import replace_weights
from metronome.errors import MetronomeError, WorkerFailed
from metronome_areal.checks import check_received
from metronome_areal.weights import bits

_WHERE = "the CPU room's engine"


class Generator:
    """A transformers model in this process behind one decode batch.

    Log-probs are of the distribution that was sampled from: after temperature, top-k and top-p.

    Args:
        model: of transformers, on the CPU.
        ends: its end tokens.
        context: tokens that a row may have, with its prompt.

    Attributes:
        version: of the weights; every token gets the one that sampled it.
        least_seconds: a decode step takes at least this long; 0 by default.
    """

    def __init__(self, model: Any, ends: frozenset[int], context: int) -> None:
        self.ends, self.context = ends, context
        self.version = 0
        self.least_seconds = 0.0
        self._model = model
        self._batch = DecodeBatch(model, processed=True)
        self._waiting: deque[Row] = deque()
        self._work, self._open = threading.Event(), threading.Event()
        self._open.set()
        self._between_steps = threading.Lock()
        self._stopped = False
        self._given: list[int] | None = None
        self._thread = threading.Thread(target=self._serve, name="metronome-room", daemon=True)
        self._thread.start()

    async def run(self, row: Row) -> None:
        """Continues ``row`` until it is finished, or ``pause`` ends this pass; its tokens so far stay in it.

        Raises WorkerFailed if the model raises, and MetronomeError after ``stop``.
        """
        if self._stopped:
            raise MetronomeError("the engine was destroyed", where=_WHERE, remedy="generate before destroy()")
        row.future = Future()
        self._waiting.append(row)
        self._work.set()
        await asyncio.wrap_future(row.future)

    def pause(self) -> None:
        """Ends the pass of every row, with the tokens so far; new ones wait for ``resume``."""
        self._open.clear()
        with self._between_steps:
            rows = [*self._batch.rows, *self._waiting]
            self._waiting.clear()
            self._batch.clear()
        for row in rows:
            _settle(row)

    def resume(self) -> None:
        """Lets rows in again."""
        self._open.set()

    def replace(self, named: Mapping[str, torch.Tensor], version: int | None) -> None:
        """Takes a full set of weights between two steps, and their version.

        Raises WorkerFailed for a set that doesn't fit, and nothing is taken then; MetronomeError if it is another one
        than the last and the model is as it was.
        """
        given = bits(named.values())
        with self._between_steps:
            before = bits(self._model.parameters())
            replace_weights(self._model, named, where=_WHERE, remedy="train and generate with the same actor.path")
            taken = bits(self._model.parameters()) != before
            if version is not None:
                self.version = version
        check_received(self._given not in (None, given), taken, f"{_WHERE}, version {version}")
        self._given = given

    def set_version(self, version: int) -> None:
        """Names the weights that are here."""
        with self._between_steps:
            self.version = version

    def stop(self) -> None:
        """Ends the thread; rows in flight are cancelled."""
        self._stopped = True
        self._open.set()
        self._work.set()
        self._thread.join()
        for row in (*self._batch.rows, *self._waiting):
            row.future.cancel()

    def _serve(self) -> None:
        while True:
            self._work.wait()
            self._open.wait()
            if self._stopped:
                return
            start = time.monotonic()
            with self._between_steps:
                if self._open.is_set():
                    self._step()
            time.sleep(max(0.0, self.least_seconds - (time.monotonic() - start)))

    def _step(self) -> None:
        self._work.clear()
        self._batch.drop([row for row in self._batch.rows if row.future.cancelled()])
        joining = []
        while self._waiting:
            row = self._waiting.popleft()
            if not row.future.cancelled():
                joining.append(row)
        try:
            finished = self._batch.advance(joining, self.version)
        except Exception as error:  # whatever the model raises belongs to the requests, not to this thread
            rows = {id(row): row for row in (*self._batch.rows, *joining)}
            self._batch.clear()
            failure = WorkerFailed(
                f"the model raised while decoding: {type(error).__name__}: {error}",
                where=_WHERE,
                remedy="see the cause above",
            )
            failure.__cause__ = error
            for row in rows.values():
                _settle(row, failure)
            return
        for row in finished:
            _settle(row)
        if self._batch.rows or self._waiting:
            self._work.set()


def _settle(row: Row, error: Exception | None = None) -> None:
    if row.future.set_running_or_notify_cancel():
        if error is None:
            row.future.set_result(None)
        else:
            row.future.set_exception(error)
