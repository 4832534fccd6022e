"""OpenRLHF's synchronous trainer with our hooks; ``periodic`` trains a batch's groups as they finish."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import ray
import torch
from openrlhf.trainer import ppo_trainer
from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call

from metronome.contracts import StepStats
from metronome.controller_check import checked_metrics, checked_size, explained
from metronome_openrlhf import experience
from metronome_openrlhf.checks import ZeroRate, check_change, check_life, check_received, check_versions
from metronome_openrlhf.config import part_of
from metronome_openrlhf.loss import announce
from metronome_openrlhf.maker import MetronomeMaker
from metronome_openrlhf.samples import Arriving, MetronomeSamples
from metronome_openrlhf.seen import Seen
from metronome_openrlhf.shares import shares
from metronome_openrlhf.state import restored, saved
from metronome_openrlhf.windows import windows

_Base: Any = ppo_trainer.PPOTrainer.__ray_metadata__.modified_class


class MetronomeTrainer(_Base):
    """OpenRLHF's ``PPOTrainer`` with the group controller, our experience maker, and the periodic step.

    Attributes:
        version: of the weights that the engines hold, or get at the next broadcast: the global step.
    """

    samples_generator: Any
    experience_maker: Any

    def __init__(self, pretrain: str, strategy: Any, *groups: Any, **generate_kwargs: Any) -> None:
        experience.install()
        self.part = part_of(strategy.args)
        torch.manual_seed(int(strategy.args.train.seed))  # by which prompts are shuffled; OpenRLHF leaves it to chance
        super().__init__(pretrain, strategy, *groups, **generate_kwargs)
        own, maker = self.samples_generator, self.experience_maker
        self.samples_generator = MetronomeSamples(
            own.strategy, own.prompts_dataloader, own.eval_dataloader, own.tokenizer, own.vllm_engines
        )
        self.samples_generator.part = self.part
        self.experience_maker = MetronomeMaker(
            maker.actor_model_group,
            maker.critic_model_group,
            maker.reward_model_group,
            maker.initial_model_group,
            maker.kl_ctl,
            maker.strategy,
            maker.tokenizer,
        )
        self.version = 0
        self._received: list[float] = []
        self._moved = False
        self._pass_rate: float | None = None
        self._say_rate, self._seen = ZeroRate(strategy.args), Seen()
        streamed = self.part.mode == "periodic"
        if self.part.owns_groups:
            self.windows = windows(self.args, self.part.selection.group_controller.largest(), streamed)
            self._window = int(self.args.train.batch_size)
            self.samples_generator.begin = self._begin
            self.samples_generator.multiple = self.windows.multiple
        if streamed:
            self.max_steps = self._periods()

    def _periods(self) -> int:
        """Periods of the run, the last of an episode with the prompts that are left, while G is what it is now."""
        prompts = int(self.args.rollout.batch_size)
        if self.part.owns_groups:
            controller = self.part.selection.group_controller
            prompts = self.windows.prompts(controller, checked_size(controller, "start"))
        return -(-len(self.prompts_dataloader) // prompts) * int(self.args.train.num_episodes)

    # --- group controller ---------------------------------------------------------------------------

    def _begin(self) -> None:
        """Sets G and P of the batch that is drawn next."""
        controller, rollout = self.part.selection.group_controller, self.args.rollout
        size = checked_size(controller, f"step {self.version + 1}")
        prompts = self.windows.prompts(controller, size)
        rollout.n_samples_per_prompt, rollout.batch_size = size, prompts
        rollout.vllm_generate_batch_size = prompts

    def _fill_windows(self, rows: int) -> None:
        """Lets an optimiser step take its share of a batch of ``rows``, so that none is half filled at its end."""
        window = rows // self.windows.steps
        if window != self._window:
            ray.get(self.actor_model_group.async_run_method(method_name="metronome_window", rows=window))
            self._window = window

    def _observe(self, stats: list[Any], bubble: float | None, global_step: int, status: dict[str, Any]) -> None:
        if not self.part.owns_groups:
            return
        controller = self.part.selection.group_controller
        found = checked_metrics(controller, StepStats(global_step + 1, stats, bubble))
        status.update({f"metronome/group_controller/{name}": value for name, value in found.items()})
        status["metronome/group_controller/size"] = int(self.args.rollout.n_samples_per_prompt)
        print(f"metronome: {explained(controller)}", flush=True)

    # --- a step -------------------------------------------------------------------------------------

    def broadcast_to_vllm(self) -> None:
        """OpenRLHF's; the engines learn which version they got, and must hold other weights than before."""
        if self.args.vllm.enable_sleep and not self._received:  # the weights of a sleeping engine can't be read
            batch_vllm_engine_call(self.vllm_engines, "wake_up", tags=["weights"])
        before = self._received or self._fingerprints()
        super().broadcast_to_vllm()
        ray.get([engine.set_version.remote(self.version) for engine in self.vllm_engines])
        self._received = self._fingerprints()
        check_received(before, self._received, self._moved, f"publication of version {self.version}")

    def _fingerprints(self) -> list[float]:
        found: list[float] = ray.get([engine.fingerprint.remote() for engine in self.vllm_engines])
        return found

    def ppo_train(self, global_steps: int) -> dict[str, Any]:
        """OpenRLHF's; a step that changed nothing, or left a hook out, isn't published."""
        announce(self.actor_model_group, self.part, global_steps)
        status: dict[str, Any] = super().ppo_train(global_steps)
        self._prove(status, global_steps)
        return status

    def train_step(self, rollout_samples: Any, global_step: int) -> tuple[dict[str, Any], int]:
        """One batch; in periodic mode of groups that are still arriving."""
        self.version = global_step + 1  # what this step publishes
        if isinstance(rollout_samples, Arriving):
            return self._period(rollout_samples, global_step)
        if self.part.owns_groups:
            self._fill_windows(len(rollout_samples))
        status, done = super().train_step(rollout_samples, global_step)
        self._observe(self.samples_generator.stats, None, global_step, status)
        return status, done

    def _prove(self, status: dict[str, Any], global_step: int) -> None:
        check_change(status, f"step {global_step + 1}")
        check_life(status, self.part, f"step {global_step + 1}")
        self._say_rate(status, global_step)
        self._moved = bool(status.get("metronome/weights/changed", False))

    def _period(self, arriving: Arriving, global_step: int) -> tuple[dict[str, Any], int]:
        expected = int(self.args.rollout.batch_size) * int(self.args.rollout.n_samples_per_prompt)
        sums: dict[str, tuple[float, float]] = {}
        seen: list[Any] = []
        parts, sample = 0, None
        announce(self.actor_model_group, self.part, global_step)
        while groups := arriving.part():
            for group in groups:
                check_versions(group, global_step, f"step {global_step + 1}, periodic")
            made = self.experience_maker.make_groups(groups)
            self._accumulate(made, expected, sums)
            rows = [row for group in made for row in group]
            seen += [_outcome(row) for row in rows]
            sample = sample or self._sample(rows[0])
            parts += 1
        self.samples_generator.uncounted = arriving.drawn - arriving.told
        stepped = ray.get(self.actor_model_group.async_run_method(method_name="metronome_step", rows=len(seen)))[0]
        status = {name: total / weight for name, (total, weight) in sums.items() if weight} | stepped
        self._prove(status, global_step)
        trained = time.monotonic()
        self.broadcast_to_vllm()
        now = time.monotonic()
        elapsed = now - arriving.started
        status["timing/ppo_train"] = trained - arriving.started - arriving.waited
        status["timing/broadcast"] = now - trained
        status["metronome/periodic/parts"] = parts
        status["metronome/periodic/seconds_waiting"] = arriving.waited
        status["metronome/periodic/idle"] = arriving.waited / elapsed
        status["metronome/tpspd"] = stepped["metronome/periodic/tokens"] / elapsed / self._devices()
        status.update(self._compute_rollout_stats(seen))
        if self.args.algo.dynamic_filtering_enable:
            self._pass_rate = arriving.kept / arriving.drawn * 100  # OpenRLHF's: rows kept per 100 prompts
        self._observe(arriving.stats, status["metronome/periodic/idle"], global_step, status)
        status["generated_samples"] = sample
        return status, global_step + 1

    def _accumulate(self, made: list[list[Any]], expected: int, sums: dict[str, tuple[float, float]]) -> None:
        """Sends a part's rows to the ranks, as many micro-batches to each, and adds their metrics up."""
        handles = self.actor_model_group._actor_handlers
        lengths = [[int(row.total_length[0]) for row in group] for group in made]
        planned = shares(lengths, len(handles), int(self.args.train.micro_batch_size))
        most = max(len(one) for one in planned)
        shortest = min((row for group in made for row in group), key=lambda row: int(row.total_length[0]))
        refs = []
        for handle, batches in zip(handles, planned, strict=True):
            sent = [self._together([made[group][member] for group, member in batch]) for batch in batches]
            filled = most - len(sent)
            sent += [self._together([_masked(shortest)]) for _ in range(filled)]
            refs.append(handle.metronome_accumulate.remote(sent, expected, self.kl_ctl.value, filled))
        for found in ray.get(refs):
            for name, (total, weight) in found.items():
                done, before = sums.get(name, (0.0, 0.0))
                sums[name] = (done + total, before + weight)

    def _together(self, rows: list[Any]) -> Any:
        return experience.VersionedExperience.concat_experiences(rows, self.tokenizer.pad_token_id)

    def _sample(self, row: Any) -> list[Any]:
        text = self.tokenizer.decode(row.sequences[0], skip_special_tokens=True)
        return [text, float(row.info["reward"][0])]

    def _devices(self) -> int:
        args = self.args
        return int(args.actor.num_nodes * args.actor.num_gpus_per_node) + int(
            args.vllm.num_engines * args.vllm.tensor_parallel_size
        )

    # --- state --------------------------------------------------------------------------------------

    def save_logs_and_checkpoints(self, global_step: int, logs_dict: Any = None, client_states: Any = None) -> None:
        """OpenRLHF's, with our state in ``client_states``, and with what a streamed batch drew from the data."""
        if client_states is not None:
            client_states["metronome"] = saved(self.part)
            client_states["total_consumed_prompts"] += self.samples_generator.uncounted
        if logs_dict is not None and self._pass_rate is not None:
            logs_dict["dynamic_filtering_pass_rate"] = self._pass_rate
        if logs_dict is not None:
            self._seen.add(logs_dict)
        super().save_logs_and_checkpoints(global_step, logs_dict, client_states)

    def metronome_seen(self) -> Seen:
        """What the run showed, for its last line."""
        return self._seen

    def init_checkpoint_states(self) -> dict[str, Any]:
        """OpenRLHF's; a resumed run goes on with the saved controller and version."""
        states: dict[str, Any] = super().init_checkpoint_states()
        self.version = int(states["global_step"])
        if self.version:
            restored(self.part, states.get("metronome"))
        return states


def _outcome(row: Any) -> Any:
    """What OpenRLHF's rollout statistics read of a row."""
    return SimpleNamespace(
        info={"reward": row.info["reward"]}, response_length=row.response_length, truncated=row.truncated
    )


def _masked(row: Any) -> Any:
    """A copy of a row of which no token is trained: it keeps a rank in step with the others."""
    copy = experience.VersionedExperience(**vars(row))
    copy.action_mask = torch.zeros_like(row.action_mask)
    return copy
