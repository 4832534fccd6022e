"""transformers' own varlen function for Ascend NPUs, over a fake torch_npu, computes what backend ``npu`` does.

A subprocess each: transformers remembers at import whether there is an NPU.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers isn't installed", allow_module_level=True)

TESTS = Path(__file__).resolve().parents[1]

# As the real module: importing it defines torch.ops.npu and torch.npu.
FAKE = """
import types

import torch
from npu_standin.install import installed

__version__ = "2.13.0"
_block = installed("npu", strict_dtypes=False)
npu_fusion_attention = _block.__enter__().npu_fusion_attention
torch.npu = types.ModuleType("torch.npu")
torch.npu.is_available, torch.npu.device_count, torch.npu.current_device = lambda: True, lambda: 1, lambda: 0
"""

SCRIPT = """
import json
import sys

import torch

from metronome.contracts import AttentionNeed
from metronome.shared_prompt.npu import NpuBackend
from metronome.shared_prompt.npu_cascade import NpuCascadeBackend
from metronome.shared_prompt.select import backend_named, choose, tensor_need

torch.set_num_threads(1)
from npu_standin.cases import SCALE, inputs, outcome, plan_of

facts = {"imported with the backends": "torch_npu" in sys.modules}
need = {name: AttentionNeed(name, "bfloat16", 64, 64, 8, 2) for name in ("cpu", "npu")}
choose("auto", need["cpu"])
facts["imported for a cpu"] = "torch_npu" in sys.modules
facts["chosen"] = choose("auto", need["npu"])[0].name
facts["imported for an npu"] = "torch_npu" in sys.modules
facts["cascade off the card"] = backend_named("npu_cascade").supports(need["cpu"])

from transformers.integrations import npu_flash_attention
from transformers.utils.import_utils import is_torch_npu_available

from metronome.shared_prompt.calls import gathered

facts["transformers sees an npu"] = is_torch_npu_available()
plan = plan_of([(13, [5, 7, 1]), (6, [9])], 3)
(call,) = gathered(plan)
q_offsets, k_offsets = call.offsets(torch.device("cpu"))


def theirs(q, k, v, plan, scale, *, window, sinks):
    return npu_flash_attention.npu_flash_attn_varlen_func(
        q[call.query_rows], k[call.key_rows], v[call.key_rows], q_offsets, k_offsets, causal=True, softmax_scale=scale
    )


wanted = outcome(theirs, plan, inputs(plan))
for kind in (NpuBackend, NpuCascadeBackend):
    found = outcome(kind(device="cpu", dtypes=("float64",)).attend, plan, inputs(plan))
    facts[kind.name] = max((one - other).abs().max().item() for one, other in zip(found, wanted))
print(json.dumps(facts))
"""


@pytest.fixture
def run(tmp_path):
    """Runs the script over the fake package and gives what it found."""
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").write_text(FAKE)
    about = tmp_path / "torch_npu-2.13.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n")

    def start(**environment):
        paths = os.pathsep.join([str(tmp_path), str(TESTS)])
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return start


def test_the_function_that_transformers_calls_on_an_npu_gives_our_attention_and_gradients(run):
    facts = run()
    assert facts["transformers sees an npu"]
    assert facts["npu"] < 1e-12
    assert facts["npu_cascade"] < 1e-12
    assert not facts["imported with the backends"]
    assert not facts["imported for a cpu"]
    assert facts["imported for an npu"]
    assert facts["chosen"] == "npu"
    assert "runs on npu, this is cpu" in facts["cascade off the card"]


def test_transformers_upper_left_setting_is_another_attention(run):
    facts = run(NPU_FA2_SPARSE_MODE="2")
    assert facts["npu"] > 0.1
    assert facts["npu_cascade"] > 0.1
