"""The version of the weights behind every token, carried through OpenRLHF's batches as one more field.

OpenRLHF concatenates, splits and pads experiences by the fields of one dataclass, which it looks up as a global of its
module. ``VersionedExperience`` stands there in every process that handles samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from openrlhf.trainer.ppo_utils import experience as host
from openrlhf.trainer.ppo_utils.experience import Experience, tensor_field

UNKNOWN = -1
"""Version of a token that no engine has stamped."""


@dataclass
class VersionedExperience(Experience):
    """OpenRLHF's ``Experience`` with ``versions``.

    Attributes:
        versions: int64 ``(B, A)``; the version that sampled the action token, -1 where it isn't known. Padding holds 0
            and is outside ``action_mask``.
    """

    versions: torch.Tensor = tensor_field("step", default=None)  # noqa: RUF009  # a field, not a value


def install() -> None:
    """Puts the class into OpenRLHF's module; harmless when repeated."""
    host.Experience = VersionedExperience


def versioned(plain: Any, versions: torch.Tensor | None) -> VersionedExperience:
    """``plain`` with ``versions`` (``(B, A)``), its fields shared."""
    return VersionedExperience(**{**vars(plain), "versions": versions})
