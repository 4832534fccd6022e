"""The CUDA backends on a real card, in half precision: the contract, and the first-use check at long lengths."""

import pytest
import torch

from metronome.errors import EqualityViolated
from metronome.shared_prompt.flash_kernels import TorchFlash
from metronome.shared_prompt.flex import FlexBackend
from metronome.shared_prompt.interface import Signature
from metronome.shared_prompt.plan import SharedPromptPlan
from metronome.shared_prompt.select import choose, tensor_need
from metronome.shared_prompt.selfcheck import check_attention
from metronome.shared_prompt.varlen import VarlenBackend
from metronome.testing.attention import check_attention_backend

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card: torch.cuda.is_available() is False"),
]
BACKENDS = [VarlenBackend(), FlexBackend()]
LONG = {
    "one long group": ([(16384, [1024] * 8)], None, False),
    "uneven groups and padding": ([(4096, [256, 1000, 0, 513]), (1, [77, 1]), (300, [2048] * 4)], 16384, False),
    "a cached prompt": ([(8192, [1024, 300, 1024])], None, True),
}


@pytest.fixture
def repeatable(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS refuses to promise the same bits without it
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("repeatable")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_the_contract_holds_on_the_card(backend, dtype):
    check_attention_backend(backend, "cuda", [dtype], head_dim=64, value_dims=(64, 32))


@pytest.mark.parametrize("window", [None, 1000])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("plan", LONG)
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_long_rows_are_the_references_attention(backend, plan, window, sinks):
    groups, pad_to, cached = LONG[plan]
    row = SharedPromptPlan.build(groups, pad_to, "cuda", cached)
    layer = Signature(12, 2, 128, 128, torch.bfloat16, 128**-0.5, window, sinks)
    check_attention(backend, row, layer, torch.device("cuda"))


def test_the_check_fails_on_a_kernel_without_the_window():
    class Dropped(TorchFlash):
        def forward(self, q, k, v, call, scale, window):
            return super().forward(q, k, v, call, scale, None)

    row = SharedPromptPlan.build(LONG["one long group"][0], device="cuda")
    layer = Signature(12, 2, 128, 128, torch.bfloat16, 128**-0.5, 1000, False)
    with pytest.raises(EqualityViolated, match="isn't shared-prompt attention"):
        check_attention(VarlenBackend(kernel=Dropped()), row, layer, torch.device("cuda"))


def test_auto_takes_the_varlen_kernel_in_half_precision():
    x = torch.zeros(4, 2, 64, dtype=torch.bfloat16, device="cuda")
    backend, why = choose("auto", tensor_need(x, x, x, False, False))
    assert backend.name == "varlen", why
