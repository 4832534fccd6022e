"""Rollouts of several turns with tool tokens, and of several rows: what is counted, trained, shared and refused."""

import math
import re
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("verl", reason="the verl adapter's tests need verl (requirements/verl.txt)")
pytest.importorskip("transfer_queue", reason="verl's V1 trainer needs TransferQueue (requirements/verl.txt)")

import numpy as np
import ray_session
import torch
import workers
from omegaconf import OmegaConf
from ray_session import run_main_ppo
from tensordict import NonTensorData, NonTensorStack, TensorDict
from test_verl_end_to_end import POOL, overrides
from test_worker import close, stock, streamed
from transfer_queue import KVBatchMeta
from verl.protocol import DataProto
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

from metronome.a3po.loss import A3po
from metronome.a3po.options import A3poOptions
from metronome.contracts import GroupStats
from metronome.errors import ConfigurationError
from metronome_verl import statistics
from metronome_verl.checks import check_rows
from metronome_verl.cpu import assets
from metronome_verl.groups import RowGroup, find_groups, group_order
from metronome_verl.loss import HostLoss, _staleness
from metronome_verl.statistics import GROUP_SIZE, step_stats
from metronome_verl.versions import SPANS


@pytest.fixture(scope="module")
def worker():
    torch.set_num_threads(1)
    return workers.worker()


# --- what the controller is told ----------------------------------------------------------------------


def nested(rows):
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def test_the_controller_counts_rollouts_and_their_sampled_tokens_and_not_rows(monkeypatch):
    # two rollouts of prompt a: 0 in three rows (the last came first), 1 in one row with two tool tokens, cut at 8
    rows = {
        "a_0_2": ([1, 1], [0.0, 0.75], 3.0, 4),
        "a_0_0": ([1, 1, 1], [0.0, 0.0, 0.5], 3.0, 4),
        "a_0_1": ([1], [0.5], 3.0, 4),
        "a_1_0": ([1, 1, 0, 0, 1, 1, 1, 1], [0.0] * 7 + [0.25], 1.0, 4),
        "b_0_0": ([1, 1], [0.0, 1.0], 0.5, 2),  # of an earlier step, when G was 2
    }

    def kv_batch_get(keys, partition_id, select_fields):
        found = [rows[key] for key in keys]
        metrics = [NonTensorData({"generate_sequences": row[2], "tool_calls": 0.25}) for row in found]
        return TensorDict(
            {
                "loss_mask": nested([row[0] for row in found]),
                "rm_scores": nested([row[1] for row in found]),
                "metrics": NonTensorStack.from_list(metrics),
                GROUP_SIZE: torch.tensor([row[3] for row in found]),
            },
            batch_size=[len(keys)],
        )

    monkeypatch.setattr(statistics, "tq", SimpleNamespace(kv_batch_get=kv_batch_get))
    config = OmegaConf.create({"data": {"max_response_length": 8}, "actor_rollout_ref": {"rollout": {"n": 4}}})
    tags = [{"response_len": len(row[0])} for row in rows.values()]
    batch = KVBatchMeta(
        partition_id="train", keys=[*rows, "pad0_0_0"], tags=[*tags, {"response_len": 1, "is_padding": True}]
    )
    assert step_stats(batch, 5, config, None).groups == [
        GroupStats(4, [6, 6], [False, True], [0.75, 0.25], 0.0, 3.25),
        GroupStats(2, [2], [False], [1.0], 0.0, 0.75),
    ]


# --- advantages ---------------------------------------------------------------------------------------


def advantages(estimator, keys, scores):
    """verl's, of rows with two tokens each."""
    rewards = torch.tensor([[0.0, score] for score in scores])
    data = DataProto(
        batch=TensorDict(
            {"token_level_rewards": rewards, "response_mask": torch.ones(len(keys), 2)}, batch_size=[len(keys)]
        ),
        non_tensor_batch={"uid": np.array([key.split("_")[0] for key in keys], dtype=object)},
    )
    found = compute_advantage_for_multi_trajectories(data, keys, estimator, config=OmegaConf.create({}))
    return found.batch["advantages"][:, 0]


KEYS = ["a_0_0", "a_1_0", "a_2_0", "a_2_1"]


def test_grpo_takes_each_rollout_once_and_an_estimator_that_counts_rows_is_refused():
    rows, rollouts = advantages("grpo", KEYS, [0.0, 1.0, 0.5, 0.5]), advantages("grpo", KEYS[:3], [0.0, 1.0, 0.5])
    assert torch.equal(rows, rollouts[[0, 1, 2, 2]])
    check_rows(KEYS, "grpo")
    counted = advantages("rloo", KEYS, [0.0, 1.0, 0.5, 0.5])
    assert not torch.allclose(counted, advantages("rloo", KEYS[:3], [0.0, 1.0, 0.5])[[0, 1, 2, 2]])
    with pytest.raises(ConfigurationError, match=r"each for a rollout[^$]*rloo, 2 rows of rollout a_2[^$]*=grpo"):
        check_rows(KEYS, "rloo")
    check_rows(KEYS[:3], "rloo")  # a row each


# --- gradients ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_more_rows_than_rollouts_in_parts_have_the_gradient_of_one_batch_of_all_rows(worker, mode):
    samples = workers.Samples()
    loss = workers.stock_loss(workers.actor_config(loss_agg_mode=mode))
    wanted = stock(worker, samples, loss)
    # the trainer names the rollouts that it expects (6), and counts the rows that came (8) at the end
    found = streamed(worker, samples, loss, [[0, 1, 2], [3], [4, 5, 6, 7]], rows=8, global_batch_size=6)
    assert close(found[0], wanted[0])
    miscounted = streamed(worker, samples, loss, [[0, 1, 2], [3], [4, 5, 6, 7]], rows=9, global_batch_size=6)[0]
    assert close(miscounted, wanted[0], 1e-2) == (mode == "token-mean")


def test_tool_tokens_are_in_the_context_and_not_in_the_loss(worker):
    loss = HostLoss(workers.actor_config(), A3po(A3poOptions()))

    def gradient(change=lambda samples: None):
        samples = workers.Samples()
        samples.masks[3][1:3], samples.masks[7][2:6] = 0, 0
        samples.extra_fields = [{SPANS: [[0, 20]]} for _ in samples.responses]
        change(samples)
        return streamed(worker, samples, loss, [[0, 1, 2, 3], [4, 5, 6, 7]], metronome_version=2)[0]

    def other_numbers(samples):  # of tool tokens
        for row, tokens in ((3, slice(1, 3)), (7, slice(2, 6))):
            samples.advantages[row][tokens] += 5
            samples.behavior[row][tokens] -= 1

    def another_token(samples):
        samples.responses[7][3] = (samples.responses[7][3] + 1) % workers.VOCABULARY

    def in_the_loss(samples):
        samples.masks[7][2:6] = 1

    usual = gradient()
    assert torch.equal(gradient(other_numbers), usual)
    assert not close(gradient(another_token), usual, 1e-3)  # what follows sees it
    assert not close(gradient(in_the_loss), usual, 1e-3)


def test_staleness_goes_round_tool_tokens_and_over_turns():
    samples = workers.Samples()
    samples.prompts = samples.prompts[:2]
    samples.responses = [torch.arange(2, 10), torch.arange(2, 6)]
    samples.masks = [torch.tensor([1, 1, 1, 0, 0, 1, 1, 1]), torch.ones(4, dtype=torch.long)]
    # turn 1 was resumed and lost its last token to the tool's; turn 2 came after another publication
    samples.extra_fields = [
        {SPANS: [[2, 2], [3, 2], [5, 0], [5, 3]], "min_global_steps": 2, "max_global_steps": 5},
        {"min_global_steps": 4, "max_global_steps": 4},  # periodic mode's client records no spans
    ]
    samples.advantages = samples.behavior = samples.old = samples.reference = [torch.zeros(8), torch.zeros(4)]
    data = samples.batch()
    found = _staleness(data, data["loss_mask"].to_padded_tensor(0), torch.tensor([8, 4]), 5)
    assert found.tolist() == [3, 3, 2, -1, -1, 0, 0, 0, 1, 1, 1, 1]


# --- shared prompts -----------------------------------------------------------------------------------


def test_a_rollout_s_rows_share_the_prompt_with_their_group_and_stay_with_it():
    prompt, tool = list(range(10, 40)), [5, 6]
    turns = [[50, 51, 52], [60, 61], [70, 71, 72, 73]]
    ids = [prompt + turns[0] + tool + turns[1], prompt + turns[1], prompt + turns[1] + tool + turns[2], [*prompt, 80]]
    prompts = [30, 30, 34, 30]
    arrays = [np.array(row) for row in ids]
    groups = find_groups(arrays, prompts, ["a"] * 4)
    assert groups == [RowGroup((0, 1, 2, 3), 30)]
    assert groups[0].tokens([len(row) for row in ids]) == 30 + 7 + 2 + 8 + 1
    # by equal prompts alone the second row of the rollout would hold the prompt again
    assert len(find_groups(arrays, prompts)) == 2
    order = group_order(["a", "b", "a", "b", "a", "b"], [30, 9, 30, 9, 34, 9], [7, 1, 2, 1, 4, 1], 2)
    assert sorted(map(sorted, (order[:3], order[3:]))) == [[0, 2, 4], [1, 3, 5]]


# --- main_ppo -----------------------------------------------------------------------------------------

SEEN = re.compile(r"two turns: step (\d+) rows (\d) fed ([\d+]+) sampled (\d+) tools (\d+) version (\d+) to (\d+)")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_turns_with_tool_tokens_and_several_rows_train_in_periodic_mode(tmp_path):
    tiny = assets.make(tmp_path / "assets")
    loops = tmp_path / "loops.yaml"
    loops.write_text("- name: two_turns\n  _target_: two_turns.TwoTurns\n")
    agent = "actor_rollout_ref.rollout.agent"
    ours = [
        "+metronome.rollout_source=periodic",
        "+metronome.loss=a3po",
        "+metronome.attention=shared_prompt",
        "+metronome.group_controller=sagc",
        "+metronome.sagc.sizes=[2,4]",
        f"{agent}.agent_loop_config_path={loops}",
        f"{agent}.default_agent_loop=two_turns",
        "data.max_response_length=32",
        "trainer.total_training_steps=2",
    ]
    found = run_main_ppo(
        overrides(tiny, *POOL, *ours),
        ray_session.shared_session(),
        timeout=840,
        variables={"PYTHONPATH": str(Path(__file__).parent)},
    )
    assert found.returncode == 0, found.tail()
    rollouts = defaultdict(list)
    for one in SEEN.finditer(found.text):
        step, rows, fed, *others = one.groups()
        rollouts[int(step)].append((int(rows), sum(map(int, fed.split("+"))), *map(int, others)))
    assert [step["step"] for step in found.metrics] == [1, 2]
    for step in found.metrics:
        here = rollouts[int(step["step"])]
        assert len(here) % step["metronome/group_controller/size"] == 0
        rows, fed, sampled, tools = (sum(one[place] for one in here) for place in range(4))
        assert {one[0] for one in here} == {1, 2}
        assert tools > 0
        assert math.isfinite(step["actor/grad_norm"])
        assert step["metronome/trained/tokens"] == sampled  # what the model sampled, and no token of a tool
        assert step["metronome/trained/rows"] == rows > len(here)
        assert {one[4:] for one in here} == {(step["step"] - 1,) * 2}
        assert step["training/off_policy/trajectory_spans/max"] == 1
        assert step["metronome/loss/staleness_max"] == 0
        assert step["metronome/loss/version_unknown"] == 0
        assert step["metronome/attention/tokens_fed"] < step["metronome/attention/tokens_separate"]
        assert step["metronome/attention/tokens_separate"] % fed == 0  # every pass saw every row once
