"""Both NPU backends on a real Ascend card: the attention contract in bfloat16."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))

from npu_standin.cases import inputs, outcome, plan_of

from metronome.shared_prompt.npu import NpuBackend
from metronome.shared_prompt.npu_cascade import NpuCascadeBackend
from metronome.shared_prompt.reference import ReferenceBackend
from metronome.testing.attention import check_attention_backend


def no_card():
    """Why there is no NPU to run on, or None."""
    try:
        import torch_npu  # noqa: F401
    except Exception as error:
        return f"torch_npu can't be imported: {error}"
    return None if torch.npu.is_available() else "torch_npu sees no card"


REASON = no_card()
pytestmark = [pytest.mark.device, pytest.mark.skipif(REASON is not None, reason=REASON or "")]


@pytest.fixture(params=[NpuBackend, NpuCascadeBackend], ids=lambda kind: kind.name)
def backend(request):
    """The gradient operator gives the same bits twice only in deterministic mode."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield request.param()
    torch.use_deterministic_algorithms(before)


def test_the_contract_holds_on_the_card(backend):
    check_attention_backend(backend, "npu", dtypes=["bfloat16"], head_dim=64, value_dims=[64])


def test_lengths_of_many_kernel_blocks_agree_with_the_dense_mask(backend):
    plan = plan_of([(3000, [700, 1, 300, 700]), (50, [600, 600])], 49, device="npu")
    tensors = [x.to("npu") for x in inputs(plan, (8, 2), (128, 128), torch.bfloat16)]
    found = outcome(backend.attend, plan, tensors)
    wanted = outcome(ReferenceBackend().attend, plan, tensors)
    for one, other in zip(found, wanted, strict=True):
        assert (one.float() - other.float()).abs().max() <= 5e-2 * other.float().abs().max()
