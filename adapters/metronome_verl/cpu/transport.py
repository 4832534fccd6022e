"""The weight transport ``metronome_ray``: trainer to rollout workers through Ray's object store, on any device.

For placements where rollout has workers of its own. Importing this module registers it, so verl's
``rollout.checkpoint_engine.custom_backend_module=metronome_verl.cpu.transport`` works as well as ``attach``.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterable
from typing import Any

import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.utils import ensure_async_iterator

from metronome.errors import ConfigurationError, VersionMismatch, WorkerFailed

from . import TRANSPORT


class Digest:
    """BLAKE2 of weights in their order: names, types, shapes and values."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Takes one weight that lies on the CPU."""
        self._hash.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        self._hash.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def text(self) -> str:
        """What was taken so far, in hexadecimal."""
        return self._hash.hexdigest()


class WeightBoard:
    """Where one publication's buckets are posted: references into the object store, in order, and how it ended."""

    def __init__(self) -> None:
        self._posted = asyncio.Condition()
        self._set(False, None)

    def _set(self, is_open: bool, version: int | None) -> None:
        self._open, self._done = is_open, False
        self._buckets: list[Any] = []
        self._error: str | None = None
        self._digest = ""
        self._version = version

    async def open(self, version: int | None) -> None:
        """Starts publication ``version``."""
        async with self._posted:
            self._set(True, version)
            self._posted.notify_all()

    async def post(self, bucket: list[Any]) -> None:
        """Appends one bucket: a list holding one reference, which Ray then leaves alone."""
        async with self._posted:
            self._buckets += bucket
            self._posted.notify_all()

    async def close(self, error: str | None = None, digest: str = "") -> None:
        """Ends the publication, with the sender's error if it failed, else with the digest of all it sent."""
        async with self._posted:
            self._done, self._error, self._digest = True, error, digest
            self._posted.notify_all()

    async def clear(self) -> None:
        """Forgets the publication, which frees its buckets; receivers of the next one wait until it is open."""
        async with self._posted:
            self._set(False, None)

    async def bucket(self, place: int) -> tuple[int | None, str | None, list[Any]]:
        """Version, the sender's error, and the bucket at ``place`` in a list; an empty list after the last one."""
        async with self._posted:
            await self._posted.wait_for(lambda: self._open and (self._done or place < len(self._buckets)))
            return self._version, self._error, self._buckets[place : place + 1]

    async def digest(self) -> str:
        """That of a publication which has ended."""
        return self._digest


@CheckpointEngineRegistry.register(TRANSPORT)
class RayTransport(CheckpointEngine):
    """One end of the transport; the trainer's rank 0 is the master and owns the board.

    Every receiver gets a whole copy. The object store must hold the model once.

    Args:
        bucket_size: bytes posted at once (a single larger weight travels alone).
        is_master: whether this is the trainer's rank 0.
    """

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self._bucket_size, self._master = bucket_size, is_master
        self._board: Any = None

    def prepare(self) -> Any:
        """The board from the master, None from the others."""
        if self._master and self._board is None:
            self._board = ray.remote(WeightBoard).options(num_cpus=0).remote()
        return self._board if self._master else None

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Hands the master's board to everybody."""
        boards = [board for board in metadata if board is not None]
        if len(boards) != 1:
            raise ConfigurationError(
                "the transport needs one master", found=len(boards), where=TRANSPORT, remedy="report this: a defect"
            )
        return {"board": boards * actor_wg_world_size}, {"board": boards * rollout_world_size}

    def init_process_group(self, board: Any) -> None:
        """Takes the board."""
        self._board = board

    def finalize(self) -> None:
        """Frees the buckets; the board stays for the next publication."""
        if self._master:
            ray.get(self._board.clear.remote())

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Posts every weight; the other ranks only take part in gathering them.

        Returns ``metronome_ray/tensors`` and ``metronome_ray/bytes``.
        """
        if self._master:
            await self._board.open.remote(global_steps)
        tensors = size = held = 0
        digest = Digest()
        bucket: list[tuple[str, torch.Tensor]] = []
        try:
            async for name, tensor in ensure_async_iterator(weights):
                if not self._master:
                    continue
                bucket.append((name, tensor.detach().to("cpu", copy=True)))
                digest.add(*bucket[-1])
                tensors, size, held = tensors + 1, size + tensor.nbytes, held + tensor.nbytes
                if held >= self._bucket_size:
                    await self._board.post.remote([ray.put(bucket)])
                    bucket, held = [], 0
            if bucket:
                await self._board.post.remote([ray.put(bucket)])
        except BaseException as error:
            if self._master:  # or the receivers would wait for ever
                await self._board.close.remote(f"{type(error).__name__}: {error}")
            raise
        if not self._master:
            return {}
        await self._board.close.remote(digest=digest.text())
        return {f"{TRANSPORT}/tensors": float(tensors), f"{TRANSPORT}/bytes": float(size)}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yields every weight of publication ``global_steps``.

        Raises:
            VersionMismatch: another publication is on the board.
            WorkerFailed: the sender failed or closed without a weight, or something else arrived than it sent.
        """
        place, digest = 0, Digest()
        while True:
            version, error, references = await self._board.bucket.remote(place)
            if error is not None:
                raise WorkerFailed(f"the sender failed: {error}", where=TRANSPORT, remedy="see the trainer's error")
            if version != global_steps:
                raise VersionMismatch(
                    f"the trainer publishes another version than {global_steps}",
                    found=version,
                    where=TRANSPORT,
                    remedy="one publication at a time",
                )
            if not references:
                break
            for name, tensor in await references[0]:
                digest.add(name, tensor)
                yield name, tensor
            place += 1
        if place == 0:
            raise WorkerFailed(
                "the sender published no weight", where=TRANSPORT, remedy="see the trainer's log for its weights"
            )
        if digest.text() != (sent := await self._board.digest.remote()):
            raise WorkerFailed(
                "other weights arrived than the trainer sent",
                found=f"{digest.text()}, sent {sent}",
                where=TRANSPORT,
                remedy="report this: a bucket was lost, repeated or changed on its way",
            )
