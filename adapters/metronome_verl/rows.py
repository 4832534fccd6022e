"""verl's nested micro-batch as one packed row, and results back in verl's layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

from metronome.shared_prompt.logits import row_log_probs
from metronome.shared_prompt.plan import SharedPromptPlan
from metronome_verl.groups import Ids, RowGroup, find_groups

_COLDEST = 1e-8  # verl clamps temperatures there


@dataclass(frozen=True)
class Rows:
    """A batch's rows on the host.

    Attributes:
        ids: token ids of each row, prompt and response.
        prompt_lens: length of each row's prompt.
        temperatures: of each row.
        groups: rows that share a prompt.
    """

    ids: tuple[Ids, ...]
    prompt_lens: tuple[int, ...]
    temperatures: tuple[float, ...]
    groups: tuple[RowGroup, ...]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [len(one) for one in self.ids]

    @property
    def segments(self) -> list[tuple[int, list[int]]]:
        """What ``SharedPromptPlan.build`` takes."""
        lengths = self.lengths
        return [(group.prefix, [lengths[row] - group.prefix for row in group.rows]) for group in self.groups]

    @property
    def tokens(self) -> int:
        """Tokens of the packed row."""
        lengths = self.lengths
        return sum(group.tokens(lengths) for group in self.groups)

    def comparable(self) -> list[int]:
        """Rows of one group for a comparison with separate rows, which together hold about as much; [] if none.

        The largest group's rows that have a response: two at least, and more while separate rows don't outgrow
        the packed row.
        """
        lengths = self.lengths
        groups = [[row for row in group.rows if lengths[row] > self.prompt_lens[row]] for group in self.groups]
        chosen: list[int] = []
        for row in max(groups, key=len, default=[]):
            if len(chosen) >= 2 and sum(lengths[one] for one in (*chosen, row)) > self.tokens:
                break
            chosen.append(row)
        return chosen


def read_rows(data: TensorDict) -> Rows:
    """The rows of verl's nested ``input_ids`` and ``prompts``, grouped; no copy where they are on the host."""
    ids = tuple(np.split(data["input_ids"].values().cpu().numpy(), _offsets(data["input_ids"])[1:-1]))
    prompt_lens = tuple(np.diff(_offsets(data["prompts"])).tolist())
    temperature = tu.get_non_tensor_data(data=data, key="temperature", default=1.0)
    if isinstance(temperature, Tensor) and temperature.dim():
        temperatures = tuple(temperature.tolist())
    else:
        temperatures = (float(temperature),) * len(ids)
    groups = find_groups(ids, prompt_lens, _uids(data, len(ids)), temperatures)
    return Rows(ids, prompt_lens, temperatures, tuple(groups))


@dataclass(frozen=True, eq=False)
class PackedRow:
    """One packed row on the device, and where its results go.

    Attributes:
        plan: its layout.
        tokens: int64 ``[T]``, its token ids, padding 0.
        places: int64 ``[N]``, where each response token's results stand among the batch's nested values: at the
            token before it, as verl's do.
        temperature: one for all, or ``[U]``, of each distinct label row.
    """

    plan: SharedPromptPlan
    tokens: Tensor
    places: Tensor
    temperature: float | Tensor

    @classmethod
    def build(cls, rows: Rows, device: torch.device, padding: int = 0) -> PackedRow:
        """Packs ``rows`` on ``device`` with ``padding`` more tokens at the end."""
        plan = SharedPromptPlan.build(rows.segments, rows.tokens + padding, device)
        starts = np.cumsum([0, *rows.lengths])
        tokens, places = [], []
        for group in rows.groups:
            tokens.append(rows.ids[group.rows[0]][: group.prefix])
            for row in group.rows:
                tokens.append(rows.ids[row][group.prefix :])
                places.append(np.arange(starts[row] + group.prefix, starts[row + 1]) - 1)
        tokens.append(np.zeros(padding, dtype=np.int64))
        both = [torch.from_numpy(np.concatenate(one)).to(device, non_blocking=True) for one in (tokens, places)]
        temperature: float | Tensor = max(_COLDEST, rows.temperatures[0])
        if len(set(rows.temperatures)) > 1:
            lengths = rows.lengths
            of_token = [
                np.full(lengths[row] - group.prefix, rows.temperatures[row], dtype=np.float32)
                for group in rows.groups
                for row in group.rows
            ]
            first = plan.label_order[torch.from_numpy(plan.label_bounds[:-1]).to(device)]
            temperature = torch.from_numpy(np.concatenate(of_token)).to(device)[first].clamp(min=_COLDEST)
        return cls(plan, both[0], both[1], temperature)

    def results(self, logits: Tensor, nested: Any, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Log-probs, and if asked entropies, in ``nested``'s layout: ``[rows, prompt + response]``, float32.

        The result of token t stands at t - 1, as in verl. Where no response token's stands (inside the shared
        prefix, at a row's last token) it is zero; verl's engine has a prompt token's log-prob there, or the
        next row's first token's, and nothing in its losses or trainers reads them.

        Args:
            logits: ``[U,V]``, of ``plan.unique_label_rows``.
            nested: the batch's ``input_ids``.
            entropy: whether entropies are computed.
        """
        temperature = self.temperature
        if isinstance(temperature, Tensor):
            logits, temperature = logits / temperature.to(logits.dtype)[:, None], 1.0
        tokens = self.tokens[self.plan.response_index]
        found = row_log_probs(logits, _float, tokens, self.plan, logits.shape[-1], temperature, entropy)
        log_probs, entropies = (None if one is None else self.scatter(one, nested) for one in found)
        assert log_probs is not None
        return log_probs, entropies

    def scatter(self, values: Tensor, nested: Any) -> Tensor:
        """``[N]``, one for each response token, in ``nested``'s layout as ``results`` says."""
        flat = values.new_zeros(nested.values().shape[0])
        if self.plan.response_tokens:
            flat = flat.index_copy(0, self.places, values)
        else:
            flat = flat + values.sum()  # zero, with the graph that backward() needs
        out: Tensor = torch.nested.nested_tensor_from_jagged(flat, nested.offsets())
        return out


def _float(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _offsets(nested: Any) -> Ids:
    found: Ids = nested.offsets().cpu().numpy()
    return found


def _uids(data: TensorDict, rows: int) -> list[Any] | None:
    """verl's ``uid`` of each row where the data carries it; a list, an array or a stack, by how it travelled."""
    found = data.get("uid", None)
    if found is None or isinstance(found, str):
        return None
    uids = [getattr(one, "data", one) for one in (found.tolist() if hasattr(found, "tolist") else found)]
    return uids if len(uids) == rows else None
