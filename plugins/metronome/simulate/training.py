"""What it costs to train a group: rows with or without a shared prompt, and a recomputed proximal policy."""

from __future__ import annotations

from dataclasses import dataclass

from metronome.shared_prompt.cost import attention_ratio, token_ratio
from metronome.simulate.cluster import Trainer
from metronome.simulate.lengths import Group
from metronome.simulate.policy import Policy


@dataclass(frozen=True, slots=True)
class Work:
    """Of one group: seconds of all ranks together, and the tokens that they pass.

    Attributes:
        training: forward and backward passes.
        proximal: the forward pass of a recomputed proximal policy.
        tokens: in the rows.
    """

    training: float
    proximal: float
    tokens: int

    @property
    def seconds(self) -> float:
        """Both parts."""
        return self.training + self.proximal


def work(trainer: Trainer, policy: Policy, group: Group) -> Work:
    """Seconds to train ``group`` on all ranks.

    Separate rows: ``seconds_per_group + t``, ``t = seconds_per_token * sum_r (Lp + Lr) / speed``. A shared prompt:
    ``t * ((1 - a) / token_ratio + a / attention_ratio)`` with a = attention_share (``metronome.shared_prompt.cost``).
    Rows that are padded have the group's longest response for every Lr. A recomputed proximal policy adds
    ``forward_share`` of the whole.
    """
    padded = trainer.padded and not policy.shared_prompt
    tokens = row_tokens(group, padded=padded)
    seconds = trainer.seconds_per_token * tokens / trainer.speed()
    if policy.shared_prompt:
        share = trainer.attention_share
        linear = (1.0 - share) / token_ratio(group.prompt_tokens, group.responses)
        seconds *= linear + share / attention_ratio(group.prompt_tokens, group.responses)
        tokens = group.prompt_tokens + sum(group.responses)
    seconds += trainer.seconds_per_group
    return Work(seconds, trainer.forward_share * seconds if policy.proximal == "recompute" else 0.0, tokens)


def row_tokens(group: Group, *, padded: bool) -> int:
    """Tokens of a group's separate rows; ``padded``: each as long as the longest."""
    size = len(group.responses)
    return group.prompt_tokens * size + (max(group.responses) * size if padded else sum(group.responses))
