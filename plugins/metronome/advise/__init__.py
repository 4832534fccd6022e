"""What a recorded run says about the techniques: which would pay in it, how much, and which not to bother with.

The run's own lengths and times calibrate the cluster of ``metronome.simulate`` (``calibrate``), each technique is
replayed on its arrivals (``replay``) or simulated (``gain``), and ``advise`` says what to turn on.
"""

from metronome.advise.advise import Advice, Row, advise
from metronome.advise.calibrate import Base, calibrate
from metronome.advise.measure import Facts, measure

__all__ = ["Advice", "Base", "Facts", "Row", "advise", "calibrate", "measure"]
