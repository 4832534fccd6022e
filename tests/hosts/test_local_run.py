"""Whole runs of the local host with a tiny model: what a run leaves behind, and the promises of its options."""

import time

import pytest
import torch
import yaml
from tiny_runs import UNEVEN, built, groups_in, periods_in, train, trained_in

from metronome.errors import ConfigurationError
from metronome_local import host
from metronome_local.progress import read_jsonl
from metronome_local.validation import validate

pytestmark = pytest.mark.timeout(150)


def test_a_run_leaves_metrics_groups_a_board_and_checkpoints(whole):
    folder, trainer = whole
    records = periods_in(folder)
    assert [record["period"] for record in records] == [1, 2, 3, 4, 5]
    assert [record["reward"] for record in trainer.history] == [record["reward"] for record in records]
    for number, record in enumerate(records):
        assert record["version"] == number
        assert record["tpspd"] > 0
        assert record["tpspd"] == pytest.approx(record["tokens"] / record["seconds"] / 2)
        assert all(
            record[f"calls/{hook}"] > 0 for hook in ("rollout_source", "policy_loss", "attention", "group_controller")
        )
        assert len(record["arrivals"]) == record["calls/rollout_source"] == record["prompts"]
        assert record["tokens_computed"] > 0
        assert record["seconds"] > record["seconds_training"] > 0
    assert list((folder / "tensorboard").glob("events*"))
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["000004", "000005"]
    evaluated = [r["period"] for r in read_jsonl(folder / "metrics.jsonl") if "held_out_accuracy" in r]
    assert evaluated == [0, 2, 4, 5]
    assert yaml.safe_load((folder / "recipe.yaml").read_text())["sampling"]["slots"] == 1


def test_every_prompt_is_trained_once_at_the_version_that_sampled_it(whole):
    folder, _ = whole
    trained = trained_in(folder)
    assert sorted(trained) == list(range(len(trained)))
    for group in groups_in(folder):
        assert group["versions"] == [group["trained_at"]] == [group["period"] - 1]
        assert len(group["rewards"]) == len(group["texts"]) == group["size"]
    for record in periods_in(folder):
        mine = [group for group in groups_in(folder) if group["period"] == record["period"]]
        assert len(mine) == record["prompts"]
        assert {group["size"] for group in mine} == {record["group_size"]}
        assert record["prompts"] * record["group_size"] == 16  # fixed rollouts


def test_the_controller_moves_and_each_publication_has_weights_of_its_own(whole):
    records = periods_in(whole[0])
    assert {record["group_size"] for record in records} == {2, 4}
    assert len({record["fingerprint"] for record in records}) == len(records)


def test_an_audited_period_finds_the_streamed_gradient(whole):
    differences = [record.get("loss/audit_difference") for record in periods_in(whole[0])]
    assert [found is not None for found in differences] == [True, False, True, False, True]
    assert all(0.0 < found < 1e-4 for found in differences if found is not None)  # two backends, two roundings


def test_audits_that_could_not_tell_are_refused(tiny_recipe):
    name = tiny_recipe()["model"]["name"]
    audit = {"periodic": {"audit_every": 1, "strict": False}}
    validate(tiny_recipe(metronome=audit), "the test's recipe")
    with pytest.raises(ConfigurationError, match=r"rounding alone.*audit_tolerance"):
        validate(tiny_recipe(model={"name": name, "dtype": "bfloat16"}, metronome=audit), "the test's recipe")
    with pytest.raises(ConfigurationError, match=r"makes several steps.*audit_every: 0"):
        validate(tiny_recipe(training={"epochs": 2}, metronome=audit), "the test's recipe")


def test_a_synchronous_run_of_the_same_seed_trains_the_same_prompts_with_the_same_gradient(whole, resumable, tmp_path):
    folder = tmp_path / "run"
    recipe = {**resumable, "training": {**resumable["training"], "periods": 2}, "evaluation": {"every": 0}}
    recipe["sampling"] = {**resumable["sampling"], "slots": 8}  # other neighbours, the same samples
    recipe["metronome"] = {
        key: "synchronous" if key == "rollout_source" else value
        for key, value in resumable["metronome"].items()
        if key != "periodic"
    }
    train(recipe, folder)
    first = {group["index"]: group for group in groups_in(folder) if group["period"] == 1}
    wanted = {group["index"]: group for group in groups_in(whole[0]) if group["period"] == 1}
    assert first.keys() == wanted.keys()
    for index, group in first.items():
        assert group["texts"] == wanted[index]["texts"]
        assert group["rewards"] == wanted[index]["rewards"]
    synchronous, periodic = periods_in(folder), periods_in(whole[0])
    assert synchronous[0]["loss/grad_norm"] == pytest.approx(periodic[0]["loss/grad_norm"], rel=1e-4)
    assert synchronous[1]["loss/grad_norm"] != pytest.approx(synchronous[0]["loss/grad_norm"], rel=1e-4)
    assert trained_in(folder).items() <= trained_in(whole[0]).items()


@pytest.mark.parametrize("in_flight", ["finish", "abort", "resume"])
def test_a_bounded_run_reaches_its_staleness_and_never_passes_it(tiny_recipe, tmp_path, in_flight):
    (tmp_path / "rollouts.py").write_text(UNEVEN)
    folder = tmp_path / "run"
    recipe = tiny_recipe(
        sampling={"rollout": f"{tmp_path / 'rollouts.py'}:uneven", "max_tokens": 120, "slots": 64},
        training={"periods": 5, "in_flight": in_flight, "lr": 1e-3},
        metronome={
            "rollout_source": "bounded",
            "bounded": {"max_staleness": 2},
            "loss": "a3po",
            "fixed": {"size": 2},
        },
    )
    with built(recipe, folder) as trainer:
        rows, add, pool = [], trainer.parts.gradient.add, trainer.parts.pool

        def noted(groups, version, *rest):
            # The third period waits for the long rollouts, which publications have met in the middle.
            deadline = time.monotonic() + 30
            while version == 2 and time.monotonic() < deadline:
                if not any(one.job.prompt.index % 3 == 0 for one in list(pool._pending.values())):
                    break
                time.sleep(0.02)
            rows.extend((version, group.index, row) for group in groups for row in group.rows)
            add(groups, version, *rest)

        trainer.parts.gradient.add = noted
        host.train(trainer, trainer.console)
    trained = trained_in(folder)
    assert len(trained) == 20
    assert trained.keys() == {index for _, index, _ in rows}
    staleness = [version - v for version, _, row in rows for v in row.versions]
    records = periods_in(folder)
    assert max(staleness) == max(record["loss/staleness_max"] for record in records) == 2
    assert min(staleness) == 0
    spanning = {index for _, index, row in rows if len(set(row.versions)) > 1}
    for _, _, row in rows:
        assert row.versions == sorted(row.versions)
    counts = {name: sum(record[name] for record in records) for name in ("dropped", "aborted")}
    again = {group["index"] for group in groups_in(folder) if group["index"] < 12 and 0 not in group["versions"]}
    assert bool(again) == (in_flight == "abort")  # the first twelve go out at version 0
    assert (counts["aborted"] > 0) == (in_flight == "abort")
    assert bool(spanning) == (in_flight == "resume")
    if in_flight == "resume":
        assert any(len(group["versions"]) > 1 for group in groups_in(folder))
        assert counts["dropped"] > 0  # by the third period the long ones of the first are at the bound
    # Whatever was dropped or aborted is pending or trained, nothing is lost: all indices below the next are known.
    state = trainer.stream.state_dict()
    assert set(state["pending"]) | set(trained) == set(range(state["next_index"]))
    assert not set(state["pending"]) & set(trained)


def test_lora_publishes_its_adapter_and_leaves_the_base_alone(tiny_recipe, tmp_path):
    pytest.importorskip("peft")
    recipe = tiny_recipe(
        model={"name": tiny_recipe()["model"]["name"], "lora": {"rank": 4, "targets": ["q_proj", "v_proj"]}},
        training={"kl": 0.1, "lr": 1e-2, "mini_batches": 2},
        metronome={"rollout_source": "synchronous"},
    )
    with built(recipe, tmp_path / "run") as trainer:
        model = trainer.parts.model
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        start = trainer.parts.weights.fingerprint()
        host.train(trainer, trainer.console)
        moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert all("lora_" in name for name in moved)
    fingerprints = [start] + [record["fingerprint"] for record in periods_in(tmp_path / "run")]
    assert len(set(fingerprints)) == 3
    assert all(record["loss/kl"] >= 0 for record in periods_in(tmp_path / "run"))
    saved = torch.load(tmp_path / "run" / "checkpoints" / "000002" / "trainer.pt", weights_only=True)
    assert saved["weights"].keys() == {name for name in before if "lora_" in name}


def test_half_precision_checkpointing_and_dynamic_sampling_train_together(tiny_recipe, tmp_path):
    folder = tmp_path / "run"
    base = tiny_recipe()
    recipe = tiny_recipe(
        model={"name": base["model"]["name"], "dtype": "bfloat16", "gradient_checkpointing": True},
        task={**base["task"], "reward": base["task"]["reward"].replace(":early", ":rare")},
        training={"algorithm": "dapo", "periods": 2, "lr": 3e-3},
        metronome={
            "periodic": {"audit_every": 1, "audit_tolerance": 0.1},
            "shared_prompt": {"backend": "cascade"},
        },
    )
    trainer = train(recipe, folder)
    records, groups = periods_in(folder), groups_in(folder)
    assert sum(record["filtered"] for record in records) > 0
    assert all(1e-4 < record["loss/audit_difference"] < 0.1 for record in records)
    for record in records:
        assert len([group for group in groups if group["period"] == record["period"]]) == 4
        assert record["calls/attention"] >= 4 * 2
    assert all(len(set(group["rewards"])) == 2 for group in groups)  # what has no differences was replaced
    trained_in(folder)
    assert records[0]["fingerprint"] != records[1]["fingerprint"]
    assert trainer.parts.model.dtype == torch.float32  # bf16 is how it computes, not what the optimiser holds
