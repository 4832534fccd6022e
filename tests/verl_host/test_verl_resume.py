"""A run of verl's unmodified ``main_ppo`` that ends in the middle and is resumed by verl's own ``resume_mode``."""

import json

import pytest

pytest.importorskip("verl", reason="the verl adapter's tests need verl (requirements/verl.txt)")
pytest.importorskip("transfer_queue", reason="verl's V1 trainer needs TransferQueue (requirements/verl.txt)")

import pyarrow
from pyarrow import parquet
from ray_session import run_main_ppo
from test_verl_end_to_end import POOL, overrides, session, tiny

__all__ = ["session", "tiny"]  # fixtures

pytestmark = pytest.mark.slow


@pytest.mark.timeout(1200)
def test_a_resumed_periodic_run_goes_on_with_its_controller_and_takes_each_prompt_once(tiny, session, tmp_path):
    saved, dumped, distinct = (tmp_path / name for name in ("checkpoints", "rollouts", "distinct.parquet"))
    table = parquet.read_table(tiny.train)
    rows = {str(row["prompt"]): row for row in table.to_pylist()}
    parquet.write_table(pyarrow.Table.from_pylist(list(rows.values()), schema=table.schema), distinct)
    ours = [
        f"data.train_files={distinct}",
        "+metronome.rollout_source=periodic",
        "+metronome.group_controller=sagc",
        "+metronome.sagc.sizes=[2,4]",
        "trainer.save_freq=1",
        f"trainer.default_local_dir={saved}",
        f"trainer.rollout_data_dir={dumped}",
        "+actor_rollout_ref.rollout.engine_kwargs.metronome_hf.seconds_per_token=0",
    ]
    pool = [one for one in POOL if "seconds_per_token" not in one]
    first = run_main_ppo(overrides(tiny, *pool, *ours), session, timeout=560)
    assert first.returncode == 0, first.tail()
    assert [step["step"] for step in first.metrics] == [1, 2]
    more = ["trainer.resume_mode=auto", "trainer.total_training_steps=3"]
    second = run_main_ppo(overrides(tiny, *pool, *ours, *more), session, timeout=560)
    assert second.returncode == 0, second.tail()
    assert [step["step"] for step in second.metrics] == [3]

    # The controller goes on from what it had learnt, and its G is the one that it had decided on.
    before, after = (
        json.loads((saved / f"global_step_{step}" / "metronome.json").read_text())["group_controller"]
        for step in (2, 3)
    )
    assert (before["step"], after["step"]) == (2, 3)
    assert second.metrics[0]["metronome/group_controller/size"] == before["sizes"][before["index"]]
    assert before["rollouts"] > 0

    # Every sample of step 3 is of the weights of step 2, and no prompt came twice.
    assert second.metrics[0]["training/off_policy/trajectory_staleness/max"] == 0
    seen = []
    for step, metrics in ((1, first.metrics[0]), (2, first.metrics[1]), (3, second.metrics[0])):
        assert metrics["metronome/weights/changed"] == 1
        rows = [json.loads(line)["input"] for line in (dumped / f"{step}.jsonl").read_text().splitlines()]
        size = int(metrics["metronome/group_controller/size"])
        assert len(rows) == size * len(set(rows))
        seen += set(rows)
    assert len(seen) == len(set(seen)) >= 12  # from its start again, the data would have given those of step 1
