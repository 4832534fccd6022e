"""Routing replay of mixtures of experts: which of verl's engines replay routes, and beside which of our hooks.

R2 records the experts of the forward pass for old log-probs and replays them in training; R3 replays those of the
rollout. In verl 0.9.1 the Megatron and VeOmni engines do; others are handed the routes and don't look at them.
"""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from metronome.errors import ConfigurationError

_REPLAYING = ("megatron", "veomni")
"""Strategies for which verl's worker sets ``enable_routing_replay`` (ActorRolloutRefWorker.__init__)."""

_RECORDED = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
_BYPASS = "algorithm.rollout_correction.bypass_mode"


def check_routing(config: DictConfig, mode: str, shares_prompt: bool, notes: list[str]) -> None:
    """Refuses routing replay where it would be ignored, or would leave a chosen hook without effect.

    Raises ConfigurationError.
    """
    strategy = str(config.actor_rollout_ref.actor.strategy)
    block = "fsdp_config" if strategy.startswith("fsdp") else strategy
    where = f"actor_rollout_ref.actor.{block}.router_replay.mode"
    replay = str(OmegaConf.select(config, where) or "disabled")
    recorded = bool(OmegaConf.select(config, _RECORDED))
    if replay == "disabled":
        if recorded:
            notes.append(f"{_RECORDED}=True: routes are recorded and not replayed ({where}=disabled)")
        return
    off = f"{where}=disabled"
    if strategy not in _REPLAYING:
        raise ConfigurationError(
            f"verl's {strategy} engine doesn't replay routes: the setting would be ignored",
            found=replay,
            where=where,
            remedy=f"{off}, or actor_rollout_ref.actor.strategy={' | '.join(_REPLAYING)}",
        )
    if shares_prompt:
        raise ConfigurationError(
            "routes are replayed in separate rows, so that no batch of the run would share a prompt",
            found=replay,
            where=where,
            remedy=f"{off}, or leave metronome.attention out",
        )
    if mode == "periodic":
        raise ConfigurationError(
            "routing replay over parts of a batch isn't tested",
            found=replay,
            where=where,
            remedy=f"{off}, or metronome.rollout_source=synchronous or bounded",
        )
    if replay == "R2" and OmegaConf.select(config, _BYPASS):
        raise ConfigurationError(
            "R2 records routes in the forward pass for old log-probs, which bypass mode leaves out",
            found=f"{replay}, bypass_mode=True",
            where=where,
            remedy=f"{where}=R3 {_RECORDED}=True, or leave metronome.loss out with {_BYPASS}=False",
        )
    if replay == "R3" and not recorded:
        raise ConfigurationError(
            "R3 replays the rollout's routes, and the rollout isn't told to return them",
            found=False,
            where=_RECORDED,
            remedy=f"{_RECORDED}=True",
        )
