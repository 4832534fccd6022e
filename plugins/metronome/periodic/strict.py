"""The rules under which periodic asynchrony keeps the synchronous gradient, as a table (ours).

The paper (arXiv 2511.18871) claims the equality; its conditions (a)-(h) are ours: docs/techniques/periodic.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from metronome.contracts import RunFacts
from metronome.errors import ConfigurationError


@dataclass(frozen=True)
class Rule:
    """One condition of a promise.

    Attributes:
        clause: letter of the condition, empty where it has none.
        facts: names of the ``RunFacts`` fields it reads.
        broken: whether these facts break it.
        sentence: why that breaks the promise.
        remedy: the setting that mends it.
    """

    clause: str
    facts: tuple[str, ...]
    broken: Callable[[RunFacts], bool]
    sentence: str
    remedy: str


EQUALITY = (
    Rule(
        "a",
        ("normaliser", "normaliser_streams"),
        lambda facts: not facts.normaliser_streams,
        "a loss divided per micro-batch depends on how groups fall into micro-batches",
        "accumulate un-normalised sums and rescale once (normaliser_streams: true)",
    ),
    Rule(
        "b",
        ("advantage_scope", "ratio_is_one"),
        lambda facts: facts.advantage_scope == "batch" and not facts.ratio_is_one,
        "batch-whitened advantages stream exactly only while the policy ratio is one",
        "advantage_scope: group, or one visit per sample on policy (ratio_is_one: true)",
    ),
    Rule(
        "c",
        ("dropout",),
        lambda facts: facts.dropout != 0.0,
        "dropout draws its masks in order of arrival",
        "dropout: 0.0",
    ),
    Rule(
        "c",
        ("router_losses",),
        lambda facts: facts.router_losses,
        "router balance losses depend on which groups share a micro-batch",
        "router_losses: false (auxiliary loss coefficient 0)",
    ),
    Rule(
        "d, e",
        ("optimiser_steps",),
        lambda facts: facts.optimiser_steps != 1,
        "clip, optimiser and schedule must act once, after the last group of the period",
        "optimiser_steps: 1 (one mini-batch and one epoch per period)",
    ),
    Rule(
        "f",
        ("accumulation_dtype",),
        lambda facts: facts.accumulation_dtype not in ("float32", "float64"),
        "sums of gradients in a shorter type depend on their order",
        "accumulation_dtype: float32",
    ),
    Rule(
        "g",
        ("seeds_per_prompt",),
        lambda facts: not facts.seeds_per_prompt,
        "sampling seeds that follow the arrival give other rollouts",
        "seeds_per_prompt: true (seed from the prompt's index)",
    ),
    Rule(
        "h",
        ("drops_by_arrival",),
        lambda facts: facts.drops_by_arrival,
        "groups cut, dropped or replaced because of when they arrive bias the batch",
        "drops_by_arrival: false (cut by length or filter by content instead)",
    ),
)
"""Conditions (a)-(h); each is refused by ``periodic`` in strict mode."""

ONE_VERSION = Rule(
    "",
    ("in_flight",),
    lambda facts: facts.in_flight != "finish",
    "a group of this source may not span two versions",
    "in_flight: finish, or rollout_source: bounded",
)
"""Holds for ``synchronous`` and ``periodic``, strict or not."""

WHITENING = Rule(
    "b",
    ("advantage_scope", "ratio_is_one"),
    lambda facts: facts.advantage_scope == "batch" and not facts.ratio_is_one,
    "batch-whitened advantages can't be streamed where the policy ratio isn't one: 22 % wrong as we measured",
    "advantage_scope: group",
)
"""Holds for ``bounded``, whose samples are off policy."""


def refuse(source: str, facts: RunFacts, rules: Iterable[Rule]) -> None:
    """Raises one ConfigurationError that names every rule that ``facts`` break and what mends each.

    Args:
        source: name of the rollout source, shown as the place.
        facts: what the host's run does.
        rules: the source's conditions.
    """
    broken = [rule for rule in rules if rule.broken(facts)]
    if not broken:
        return
    sentences = [f"({rule.clause}) {rule.sentence}" if rule.clause else rule.sentence for rule in broken]
    raise ConfigurationError(
        f"this run breaks what {source} promises: {', '.join(sentences)}",
        found={name: getattr(facts, name) for rule in broken for name in rule.facts},
        where=f"metronome.rollout_source: {source}",
        remedy=", and ".join(dict.fromkeys(rule.remedy for rule in broken)),
    )
