"""Two ranks on gloo, ZeRO-2, with A-3PO: one rank's gradient and one rank's metrics, though ages are unlike."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("openrlhf", reason="the OpenRLHF adapter's tests need openrlhf (requirements/openrlhf.txt)")

import loss_two_ranks
import torch
import workers

HERE = Path(__file__).parent


def test_two_ranks_have_one_ranks_gradient_and_tell_its_metrics(tmp_path):
    model = workers.model(tmp_path / "assets").model
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "loss_two_ranks.py"), str(rank), port, str(model), str(tmp_path / "found")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    said = [one.communicate(timeout=600)[0] for one in ranks]
    assert [one.returncode for one in ranks] == [0, 0], "\n".join(text[-3000:] for text in said)
    first, second = (torch.load(tmp_path / f"found.{rank}", weights_only=False) for rank in range(2))
    worker, status = loss_two_ranks.trained(model, loss_two_ranks.batch())
    optimizer = worker.actor_optim
    expected = torch.cat(
        [
            optimizer.optimizer.state[group["params"][0]]["exp_avg"][: sum(one.numel() for one in whole)]
            for group, whole in zip(optimizer.optimizer.param_groups, optimizer.bit16_groups, strict=True)
        ]
    )
    assert float((first["moments"] - expected).norm() / expected.norm()) < 2e-6
    names = [name for name in status if name.startswith("metronome/loss/")]
    assert len(names) >= 10
    for found in (first["status"], second["status"]):
        assert {name: found[name] for name in names} == pytest.approx({name: status[name] for name in names}, rel=1e-4)
    # Half of the batch alone has another age
    _, half = loss_two_ranks.trained(model, loss_two_ranks.batch()[2:], train__batch_size=8)
    assert half["metronome/loss/staleness"] == pytest.approx(3)
    assert status["metronome/loss/staleness"] < 2
