"""A user's script under AReaL's single controller, run by test_areal_controller through ``python -m metronome_areal``.

Workers import this module for the workflow, the reward and the filter.
"""

import json
import os
import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import requests
import torch
from areal import PPOTrainer
from areal.api import SaveLoadMeta
from areal.api.cli_args import GRPOConfig, load_expr_config
from areal.infra.rpc.rtensor import RTensor, fetch_buffer_stats
from areal.utils import network
from areal.utils.recover import RecoverHandler, RecoverInfo
from areal.workflow.rlvr import RLVRWorkflow

network.random = random.SystemRandom()
"""AReaL draws ports after it has seeded Python's generator: two runs of one seed on one machine would meet."""

TOLD = "METRONOME_TEST_TOLD"
"""Names the pipe that is written to when everything is left."""

STEPS = 3
HOOKS = {
    "metronome.loss": "a3po",
    "metronome.rollout_source": "periodic",
    "metronome.attention": "shared_prompt",
    "metronome.group_controller": "sagc",
    "metronome.sagc": {
        "sizes": [2, 4],
        "start": 4,
        "min_dwell": 1,
        "event": "step_idle",
        "idle_tau": 0.001,
        "eta": 4.0,
        "delta": 0.05,
    },
    "actor.optimizer": {"type": "sgd", "lr": 0.5, "weight_decay": 0.0, "warmup_steps_proportion": 0.0},
    "total_train_steps": STEPS,
}
SHARES = ([0, 1, 2], [3], [4])
"""Groups of a period's parts: two workers can't share one of them evenly."""


@dataclass
class Config(GRPOConfig):
    """A class that no worker can import."""

    note: str = ""


def reward(prompt, completions, prompt_ids, completion_ids, answer=None, **others):
    """The share of digits."""
    return sum(one.isdigit() for one in completions) / max(1, len(completions))


class Direct(RLVRWorkflow):
    """AReaL's RLVRWorkflow, without a process pool for the reward."""

    async def _compute_rewards(self, response, prompt, data):
        text = self.tokenizer.decode(response.output_tokens)
        return reward(prompt, text, response.input_tokens, response.output_tokens, **data)


def more_than_two_tokens(group):
    """A filter that reads tensors."""
    return min(group["loss_mask"].sum(1).tolist()) > 2


def held(shards):
    """How many of these tensors AReaL's workers still have."""
    return sum(
        requests.get(f"http://{node}/data/{number}", timeout=10).status_code == 200
        for node, numbers in shards.items()
        for number in numbers
    )


def saved(actor, path):
    """The weights as AReaL saves them."""
    actor.save(SaveLoadMeta(str(path), "hf", False, None, None, None))


def watched(one, folder):
    """Notes metrics, the groups that come, how long a part is, and the weights after a step."""
    found = {"stats": [], "kinds": set(), "parts": [], "seen": [], "buffered": []}
    commit, export = one.stats_logger.commit, one.actor.metronome_part
    step = one.rollout.resume

    def keeping(*args):
        found["stats"].append({name: value for name, value in args[-1].items() if isinstance(value, int | float)})
        commit(*args)
        if not (folder / "one step").exists():
            saved(one.actor, folder / "one step")

    def noting(of_part):
        found["parts"].append([len(of_part), sum(bool(group["metronome_masked"]) for group in of_part)])
        return export(of_part)

    def resumed():
        found["buffered"].append(fetch_buffer_stats()["num_entries"])
        step()

    one.stats_logger.commit, one.actor.metronome_part, one.rollout.resume = keeping, noting, resumed
    make = one._flow

    def flow():
        made = make()
        arrived = made._arrived

        def noting(task, result):
            if result is not None:
                found["kinds"] |= {type(value).__name__ for value in result.trajectory.values()}
                found["seen"].append(RTensor.collect_shards(result.trajectory))
            arrived(task, result)

        made._arrived = noting
        return made

    one._flow = flow
    return found


def by_hand(one, folder):
    """A period of known groups, and the weights before and after it."""
    known, actor = torch.load(folder / "groups"), one.actor
    version = actor.get_version()
    saved(actor, folder / "before")
    actor.set_version(3)
    log_probs = actor.compute_logp(actor.metronome_level([dict(group) for group in known]))  # as a reference's are
    actor.metronome_begin()
    for part in SHARES:
        done = actor.metronome_part(actor.metronome_level([dict(known[place]) for place in part]))
        actor.clear_batches(done)
    metrics = actor.metronome_step()
    saved(actor, folder / "after")
    actor.set_version(version)
    return metrics, [list(one.shape) for one in log_probs]


def bounded(one, found):
    """Two steps more of the same run, bounded."""
    recover = one.config.recover
    path = RecoverHandler.recover_info_path(recover.experiment_name, recover.trial_name, recover.fileroot)
    one.recover_info = RecoverInfo.load(path)
    from metronome_areal.config import read

    block = {"loss": "a3po", "attention": "shared_prompt", "rollout_source": "bounded"}
    one.part = read(replace(one.config, metronome={"cpu": True, **block, "bounded": {"max_staleness": 1}}))
    one.config.total_train_steps, one.config.recover.mode = STEPS + 2, "disabled"
    found["stats"].clear()
    one.train(workflow=f"{MODULE}.Direct", workflow_kwargs=found["named"])
    return list(found["stats"])


MODULE = Path(__file__).stem


def main(arguments):
    config, _ = load_expr_config(arguments, Config)
    folder = Path(config.actor.path).parent
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    with PPOTrainer(config, train_dataset=rows) as one:
        found = watched(one, folder)
        found["named"] = {
            "reward_fn": f"{MODULE}.reward",
            "gconfig": config.gconfig,
            "tokenizer": config.tokenizer_path,
        }
        one.train(
            workflow=f"{MODULE}.Direct",
            workflow_kwargs=found["named"],
            dynamic_filter_fn=f"{MODULE}.more_than_two_tokens",
        )
        result = {"stats": list(found["stats"]), "parts": list(found["parts"]), "kinds": found["kinds"]}
        result |= {"groups": len(found["seen"]), "held": [held(one) for one in found["seen"]]}
        result |= {"buffered": found["buffered"], "workers": {role: len(of) for role, of in _workers(one).items()}}
        result["names"] = [type(one.actor).__name__, type(one.rollout).__name__, type(one.scheduler).__name__]
        result["controller"] = one.part.selection.group_controller.state_dict()
        result["by hand"] = by_hand(one, folder)
        result["parts by hand"] = found["parts"][len(result["parts"]) :]
        result["bounded"] = bounded(one, found)
        torch.save(result, folder / "found")
        os.write(int(os.environ[TOLD]), b"1")


def _workers(one):
    return {role: one.scheduler._workers[role] for role in ("actor", "rollout")}


if __name__ == "__main__":
    main(sys.argv[1:])
