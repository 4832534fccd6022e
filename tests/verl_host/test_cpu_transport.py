"""The weight transport ``metronome_ray`` in this process: its ends on one event loop, Ray's store replaced."""

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("verl", reason="the verl adapter's tests need verl (requirements/verl.txt)")

import torch

from metronome.errors import VersionMismatch, WorkerFailed
from metronome_verl import cpu

cpu.attach()

from metronome_verl.cpu import transport  # noqa: E402

WEIGHTS = {"a": torch.arange(4.0), "b": torch.arange(40.0), "c": torch.arange(3.0)}


class Local:
    """A Ray handle's ``method.remote(...)`` in this process."""

    def __init__(self, target):
        self._target = target

    def __getattr__(self, name):
        return SimpleNamespace(remote=getattr(self._target, name))


class Stored:
    """A reference into the object store: awaiting it gives the value."""

    def __init__(self, value):
        self._value = value

    def __await__(self):
        return self._value
        yield


@pytest.fixture
def ends(monkeypatch):
    monkeypatch.setattr(transport.ray, "put", Stored)
    board = Local(transport.WeightBoard())
    found = tuple(transport.RayTransport(64, master) for master in (True, False, False))
    for end in found:
        end.init_process_group(board)
    return found


def published(ends, *publications):
    """Metrics and weights of the last of ``publications``, each (weights, version sent, version expected)."""
    sender, idle, receiver = ends

    async def receive(version):
        return {name: tensor async for name, tensor in receiver.receive_weights(version)}

    async def each():
        for weights, sent, expected in publications:
            got = asyncio.create_task(receive(expected))
            await asyncio.sleep(0.01)  # the receiver is there first
            metrics, _ = await asyncio.gather(*[end.send_weights(weights.items(), sent) for end in (sender, idle)])
            result = metrics, await got
            await sender._board.clear.remote()  # what finalize does, as verl calls it after each publication
        return result

    return asyncio.run(asyncio.wait_for(each(), 10))


def test_every_weight_arrives_in_buckets(ends):
    metrics, got = published(ends, (WEIGHTS, 5, 5))
    assert got.keys() == WEIGHTS.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in WEIGHTS.items())
    assert metrics == {"metronome_ray/tensors": 3.0, "metronome_ray/bytes": 188.0}


def test_a_receiver_that_comes_first_waits_for_its_own_publication(ends):
    _, got = published(ends, (WEIGHTS, 1, 1), ({"a": torch.ones(4)}, 2, 2))
    assert got.keys() == {"a"}
    assert torch.equal(got["a"], torch.ones(4))


def test_another_version_is_refused(ends):
    with pytest.raises(VersionMismatch, match="found 5"):
        published(ends, (WEIGHTS, 5, 6))


def test_a_publication_without_weights_is_refused(ends):
    with pytest.raises(WorkerFailed, match="no weight"):
        published(ends, ({}, 5, 5))


def test_a_sender_that_fails_fails_its_receivers_too(ends):
    sender, _, receiver = ends

    def broken():
        yield "a", WEIGHTS["a"]
        raise RuntimeError("gather failed")

    async def receive():
        return [name async for name, _ in receiver.receive_weights(5)]

    async def both():
        return await asyncio.gather(sender.send_weights(broken(), 5), receive(), return_exceptions=True)

    sent, received = asyncio.run(asyncio.wait_for(both(), 10))
    assert isinstance(sent, RuntimeError)
    assert isinstance(received, WorkerFailed)
    assert "gather failed" in str(received)


def test_only_the_trainers_first_rank_gives_a_board():
    board = object()
    actor, rollout = transport.RayTransport.build_topology(2, 3, [board, None, None, None, None])
    assert actor == {"board": [board] * 2}
    assert rollout == {"board": [board] * 3}
    assert transport.RayTransport(1).prepare() is None


@pytest.mark.parametrize("happens", ["lost", "repeated", "changed", "renamed"])
def test_other_weights_than_were_sent_are_refused_before_they_are_installed(ends, monkeypatch, happens):
    post, posted = transport.WeightBoard.post, []

    async def spoiled(self, bucket):
        posted.append(bucket)
        weights = bucket[0]._value
        if len(posted) == 2:
            if happens == "lost":
                return
            if happens == "repeated":
                await post(self, bucket)
            if happens == "changed":
                weights[0][1][0] += 1e-6
            if happens == "renamed":
                weights[0] = "z", weights[0][1]
        await post(self, bucket)

    monkeypatch.setattr(transport.WeightBoard, "post", spoiled)
    with pytest.raises(WorkerFailed, match=r"other weights arrived than the trainer sent.*found .*, sent "):
        published(ends, (WEIGHTS, 5, 5))
    assert len(posted) == 2
