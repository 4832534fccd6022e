"""Two ranks on gloo, ZeRO-2: parts shared out unequally give the gradient of one rank that has the whole batch."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("openrlhf", reason="the OpenRLHF adapter's tests need openrlhf (requirements/openrlhf.txt)")

import torch
import workers

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return workers.model(tmp_path_factory.mktemp("assets")).model


@pytest.fixture(scope="module")
def found(model, tmp_path_factory):
    """What both ranks made of each case, from one run of two processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    out = tmp_path_factory.mktemp("ranks") / "found.pt"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "openrlhf_two_ranks.py"), str(rank), port, str(model), str(out)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    said = [one.communicate(timeout=600)[0] for one in ranks]
    assert [one.returncode for one in ranks] == [0, 0], "\n".join(text[-3000:] for text in said)
    return torch.load(out, weights_only=False)


def whole(model, **flags):
    """Moments of OpenRLHF's own step on one rank without DeepSpeed's padding, and what it said."""
    worker = workers.stock(workers.arguments(**flags), model)
    said = workers.whole_step(worker, workers.groups((2, 3, 5, 6)))
    optimizer = worker.actor_optim
    found = [
        optimizer.optimizer.state[group["params"][0]]["exp_avg"][: sum(one.numel() for one in whole)]
        for group, whole in zip(optimizer.optimizer.param_groups, optimizer.bit16_groups, strict=True)
    ]
    return torch.cat(found), said


@pytest.mark.parametrize(
    "case, flags",
    [
        ("token-mean", {}),
        ("seq-mean", {"actor__loss_agg_mode": "seq-mean-token-mean"}),
        ("clipped", {"actor__max_norm": 0.1}),
    ],
)
def test_two_ranks_with_unequal_shares_give_one_ranks_gradient(model, found, case, flags):
    found = found[case]
    expected, said = whole(model, **flags)
    assert float((found["moments"] - expected).norm() / expected.norm()) < 2e-6
    assert found["status"]["actor_grad_norm"] == pytest.approx(said["actor_grad_norm"], rel=2e-6)
    assert found["status"]["metronome/periodic/rows"] == 16
    loss, tokens, reward, rows = found["metrics"].tolist()
    assert tokens == (16 if case == "seq-mean" else found["status"]["metronome/periodic/tokens"])
    assert rows == 16
    exact = workers.stock(workers.arguments(**flags, train__micro_batch_size=16), model)  # weighs no micro-batches
    once = workers.whole_step(exact, workers.groups((2, 3, 5, 6)))
    assert loss / tokens == pytest.approx(once["policy_loss"], rel=1e-4)
    assert reward / rows == pytest.approx(said["reward"], rel=1e-5)


def test_a_rank_short_of_rows_makes_as_many_passes(found):
    assert found["token-mean"]["passes"] == [3, 4, 2]  # 6, 7 and 3 rows on two ranks


def test_a_copy_that_fills_a_rank_up_must_be_masked(model, found):
    expected, _ = whole(model)
    assert float((found["unmasked"]["moments"] - expected).norm() / expected.norm()) > 0.02
