"""Weights from the trainer to the rollout engines without NCCL: through torch's TCP store."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from metronome.errors import VersionMismatch

_TCPStore: Any = vars(dist)["TCPStore"]  # torch's stubs have it without its bytes
_WAIT = timedelta(seconds=600)


class StoreGroup:
    """What OpenRLHF needs of vLLM's NCCL communicator: ``broadcast`` from one sender to ``world_size`` - 1 receivers.

    The sender is rank 0 and holds the store. OpenRLHF waits for the receivers after each tensor, so a sent one can be
    dropped when the next but one is sent.
    """

    def __init__(self, address: str, port: int, rank: int, world_size: int) -> None:
        self.rank = rank
        self._sent = 0
        self._store = _TCPStore(address, port, world_size, is_master=rank == 0, wait_for_workers=False, timeout=_WAIT)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        """Fills ``tensor`` on every rank but ``src`` with that of ``src``, in place.

        Raises VersionMismatch when another number of bytes was sent.
        """
        self._sent += 1
        if self.rank == src:
            data = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
            self._store.set(_key(self._sent), data)
            if self._sent > 2:
                self._store.delete_key(_key(self._sent - 2))
            return
        data = self._store.get(_key(self._sent))
        wanted = tensor.numel() * tensor.element_size()
        if len(data) != wanted:
            raise VersionMismatch(
                "the weight that was sent isn't the one that is awaited",
                found=f"{len(data)} bytes instead of {wanted}",
                where=f"weight {self._sent} of the transport",
                remedy="start the run anew; the engine and the trainer hold different models",
            )
        received = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(tensor.dtype)
        tensor.copy_(received.reshape(tensor.shape))


def _key(number: int) -> str:
    return f"weight{number}"


def init_process_group(master_address: str, master_port: int, rank: int, world_size: int, device: Any) -> StoreGroup:
    """``openrlhf.utils.distributed_util.stateless_init_process_group`` on a CPU; ``device`` isn't used."""
    return StoreGroup(master_address, int(master_port), rank, world_size)
