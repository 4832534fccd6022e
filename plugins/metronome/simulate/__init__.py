"""A discrete-event model of a cluster that trains by reinforcement learning; what it gives is simulated, not measured.

``Cluster`` and ``Policy`` say what there is and how it is run, ``simulate`` gives the ``Outcome``. Not in the model:
memory and what it limits, communication within an engine or a rank, prefix caches of engines, passes of a reference or
reward model, evaluation, and what a policy does to learning.
"""

from metronome.simulate.cluster import Cluster
from metronome.simulate.lengths import Group, LengthSource, Recorded
from metronome.simulate.model import simulate
from metronome.simulate.outcome import Outcome, StepOutcome
from metronome.simulate.policy import Policy

__all__ = ["Cluster", "Group", "LengthSource", "Outcome", "Policy", "Recorded", "StepOutcome", "simulate"]
