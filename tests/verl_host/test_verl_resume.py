"""A run of verl's unmodified ``main_ppo`` that ends in the middle and is resumed by verl's own ``resume_mode``."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="the verl adapter's tests need verl (requirements/verl.txt)")
pytest.importorskip("transfer_queue", reason="verl's V1 trainer needs TransferQueue (requirements/verl.txt)")

import pyarrow
import torch
from pyarrow import parquet
from ray_session import run_main_ppo
from test_verl_end_to_end import POOL, overrides, session, tiny

__all__ = ["session", "tiny"]  # fixtures

pytestmark = pytest.mark.slow


FAST = [one for one in POOL if "seconds_per_token" not in one]
FAST.append("+actor_rollout_ref.rollout.engine_kwargs.metronome_hf.seconds_per_token=0")


@dataclass
class Run:
    """A run in two parts: two steps, then the steps up to ``last``, resumed from the checkpoint of step 2."""

    folder: Path
    metrics: list[dict[str, float]] = field(default_factory=list)
    prompts: dict[int, dict[str, list[str]]] = field(default_factory=dict)

    def part(self, tiny, session, settings, steps):
        distinct = self.folder / "distinct.parquet"
        table = parquet.read_table(tiny.train)
        rows = {str(row["prompt"]): row for row in table.to_pylist()}
        parquet.write_table(pyarrow.Table.from_pylist(list(rows.values()), schema=table.schema), distinct)
        more = [
            f"data.train_files={distinct}",
            "trainer.save_freq=1",
            f"trainer.default_local_dir={self.folder}",
            f"trainer.rollout_data_dir={self.folder / 'rollouts'}",
            "trainer.resume_mode=auto",
            f"trainer.total_training_steps={steps[-1]}",
        ]
        output = run_main_ppo(overrides(tiny, *settings, *more), session, timeout=560)
        assert output.returncode == 0, output.tail()
        assert [step["step"] for step in output.metrics] == steps
        self.metrics += output.metrics
        for step in steps:
            lines = (self.folder / "rollouts" / f"{step}.jsonl").read_text().splitlines()
            groups = self.prompts.setdefault(step, {})
            for row in map(json.loads, lines):
                groups.setdefault(row["uid"].split("_")[0], []).append(row["input"])
        return output

    def state(self, step):
        return json.loads((self.folder / f"global_step_{step}" / "metronome.json").read_text())

    def drawn(self, step):
        """How many rows had been drawn from the data at the checkpoint of ``step``."""
        position = torch.load(self.folder / f"global_step_{step}" / "data.pt", weights_only=False)
        return position["_num_yielded"]

    def once(self):
        """The prompts trained, none of them twice, and every group whole; their uids."""
        groups = [(uid, rows) for groups in self.prompts.values() for uid, rows in groups.items()]
        assert all(len(set(rows)) == 1 for _, rows in groups)
        for found in ([uid for uid, _ in groups], [rows[0] for _, rows in groups]):
            assert len(found) == len(set(found))
        return {uid for uid, _ in groups}


@pytest.mark.timeout(1200)
def test_a_resumed_periodic_run_goes_on_with_its_controller_and_takes_each_prompt_once(tiny, session, tmp_path):
    ours = [
        *FAST,
        "+metronome.rollout_source=periodic",
        "+metronome.group_controller=sagc",
        "+metronome.sagc.sizes=[2,4]",
    ]
    run = Run(tmp_path)
    run.part(tiny, session, ours, [1, 2])
    run.part(tiny, session, ours, [3])

    # The controller goes on from what it had learnt, and its G is the one that it had decided on.
    before, after = (run.state(step)["group_controller"] for step in (2, 3))
    assert (before["step"], after["step"]) == (2, 3)
    assert run.metrics[2]["metronome/group_controller/size"] == before["sizes"][before["index"]]
    assert before["rollouts"] > 0

    # Every sample of step 3 is of the weights of step 2, and no prompt came twice.
    assert run.metrics[2]["training/off_policy/trajectory_staleness/max"] == 0
    for step, metrics in enumerate(run.metrics, 1):
        assert metrics["metronome/weights/changed"] == 1
        size = int(metrics["metronome/group_controller/size"])
        assert {len(rows) for rows in run.prompts[step].values()} == {size}
    assert len(run.once()) == run.drawn(3) >= 12  # from its start again, the data would have given those of step 1


@pytest.mark.timeout(1200)
def test_a_resumed_bounded_run_stays_within_its_bound_and_neither_loses_nor_repeats_a_prompt(tiny, session, tmp_path):
    slow = (
        "+actor_rollout_ref.rollout.engine_kwargs.metronome_hf.seconds_per_token=0.3"  # slower than a step and a save
    )
    ours = [
        *FAST[:-1],
        slow,
        "+metronome.rollout_source=bounded",
        "+metronome.bounded.max_staleness=1",
        "+metronome.loss=a3po",
        "+metronome.group_controller=sagc",
        "+metronome.sagc.sizes=[2,4]",
        "+metronome.sagc.budget=fixed_prompts",
        "trainer.v1.separate_async.num_warmup_batches=2",
        "trainer.v1.separate_async.parameter_sync_step=1",
    ]
    run = Run(tmp_path)
    run.part(tiny, session, ours, [1, 2])
    output = run.part(tiny, session, ours, [3, 4])
    # Two batches of four; the one of step 2 was still being generated, the other had been finished for a while.
    assert "8 prompts were in flight at the checkpoint: 4 are generated again" in output.text
    for metrics in run.metrics:
        assert metrics["metronome/loss/staleness_max"] <= 1
        assert metrics["training/off_policy/trajectory_staleness_worst/max"] <= 1
        assert metrics["metronome/weights/changed"] == 1
    assert sum(metrics.get("training/off_policy/evicted_samples", 0) for metrics in run.metrics) > 0

    # What was drawn and isn't trained is in flight, through the eviction of stale groups and the resume.
    trained, waiting = run.once(), set(run.state(4)["in_flight"])
    assert not trained & waiting
    assert len(trained) == 16
    assert len(trained) + len(waiting) == run.drawn(4) == 24
    assert set(run.state(2)["in_flight"]) <= trained | waiting
    assert run.state(4)["group_controller"]["step"] == 4


@pytest.mark.timeout(1200)
def test_a_resumed_synchronous_run_takes_each_prompt_once_while_their_number_follows_g(tiny, session, tmp_path):
    colocated = [one for one in FAST if ".nnodes" not in one and "n_gpus" not in one and "checkpoint_engine" not in one]
    ours = [
        *colocated,
        "+metronome.rollout_source=synchronous",
        "+metronome.group_controller=sagc",
        "+metronome.sagc.sizes=[2,4]",
        "+metronome.sagc.budget=fixed_rollouts",
        "+metronome.sagc.start=2",
        "+metronome.sagc.min_dwell=1",  # without a reason to stay, the next G is the larger one
        "data.train_batch_size=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    ]
    run = Run(tmp_path)
    run.part(tiny, session, ours, [1, 2])
    run.part(tiny, session, ours, [3])
    before, after = (run.state(step)["group_controller"] for step in (2, 3))
    assert (before["step"], after["step"]) == (2, 3)
    assert [metrics["metronome/group_controller/size"] for metrics in run.metrics] == [2, 4, 4]
    for step, metrics in enumerate(run.metrics, 1):
        size = int(metrics["metronome/group_controller/size"])
        assert {len(rows) for rows in run.prompts[step].values()} == {size}
        assert len(run.prompts[step]) == 8 // size
        assert metrics["training/off_policy/trajectory_staleness/max"] == 0
    assert len(run.once()) == run.drawn(3)
