"""Holds the tests' stand-in against the official torch_npu wheel: ``make npu-contract``, on any Linux CPU.

- the pinned schemas are the wheel's, letter by letter;
- the wheel's own meta kernels give the shapes that the backends rely on;
- both backends, called through the wheel's schemas with the stand-in's arithmetic, keep the attention contract.

Needs Python 3.11, torch 2.13.0+cpu, torch_npu 2.13.0, gcc and binutils, no CANN and no NPU.
"""

import os
import sys
import tempfile
from pathlib import Path

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # import torch would load torch_npu before its libraries are there

import torch

_TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_TESTS), str(_TESTS.parent / "plugins")]

from npu_contract.loader import load  # noqa: E402
from npu_standin.install import installed  # noqa: E402
from npu_standin.schemas import SCHEMAS  # noqa: E402

_QUERIES, _KEYS, _HEADS, _KV_HEADS, _WIDTH = 20, 45, 8, 2, 32
_ENDS = {"actual_seq_qlen": (13, 18, 20), "actual_seq_kvlen": (13, 31, 45)}


def schemas_agree() -> list[str]:
    """Names of operators whose pinned schema differs from the wheel's."""
    with torch.library._scoped_library("npu_pinned", "FRAGMENT") as pinned:
        wrong = []
        for name, schema in SCHEMAS.items():
            pinned.define(name + schema)
            ours = str(getattr(torch.ops.npu_pinned, name).default._schema).replace("npu_pinned::", "npu::")
            official = str(getattr(torch.ops.npu, name).default._schema)
            same = ours == official
            print(f"schema of {name}: {'the same' if same else 'DIFFERENT'}")
            if not same:
                print(f"  pinned   {ours}\n  official {official}")
                wrong.append(name)
    return wrong


def shapes_agree() -> list[str]:
    """What differs from the shapes that we rely on, by the wheel's meta kernels."""
    import torch_npu.op_plugin.meta._meta_registrations as registrations

    registrations._npu_fusion_attention_warning_printed = True  # the warning asks for the device's name

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    q, k, v = meta(_QUERIES, _HEADS, _WIDTH), meta(_KEYS, _KV_HEADS, _WIDTH), meta(_KEYS, _KV_HEADS, _WIDTH)
    mask = meta(2048, 2048, dtype=torch.bool)
    named = {"atten_mask": mask, "sparse_mode": 3, "softmax_layout": "TND", **_ENDS}
    out, peak, total = torch.ops.npu.npu_fusion_attention(q, k, v, _HEADS, "TND", scale=0.5, **named)[:3]
    statistics = {"softmax_max": peak, "softmax_sum": total}
    gradients = torch.ops.npu.npu_fusion_attention_grad(
        q, k, v, out, _HEADS, "TND", **statistics, attention_in=out, scale_value=0.5, **named
    )[:3]
    wanted = {"out": (out, q.shape, q.dtype)}
    wanted |= {name: (one, (_QUERIES, _HEADS, 8), torch.float32) for name, one in statistics.items()}
    wanted |= {f"d{n}": (one, x.shape, x.dtype) for n, one, x in zip("qkv", gradients, (q, k, v), strict=True)}
    wrong = []
    for name, (one, shape, dtype) in wanted.items():
        same = (tuple(one.shape), one.dtype) == (tuple(shape), dtype)
        print(f"meta kernel, {name}: {tuple(one.shape)} {one.dtype}{'' if same else f', WANTED {shape} {dtype}'}")
        if not same:
            wrong.append(name)
    return wrong


def backends_agree() -> None:
    """Both backends through the wheel's schemas; raises AssertionError as the contract test does."""
    from metronome.shared_prompt.npu import NpuBackend
    from metronome.shared_prompt.npu_cascade import NpuCascadeBackend
    from metronome.testing.attention import check_attention_backend

    with installed("npu", strict_dtypes=False, define=False):
        for kind in (NpuBackend, NpuCascadeBackend):
            check_attention_backend(kind(device="cpu", dtypes=("float64", "bfloat16")))
            print(f"{kind.name}: the attention contract holds through the official schemas")


def main() -> int:
    """0 if everything agrees, else 1."""
    with tempfile.TemporaryDirectory() as folder:
        absent = load(Path(folder))
        import torch_npu

        print(f"torch {torch.__version__}, torch_npu {torch_npu.__version__}, stand-ins for {', '.join(absent)}")
        wrong = schemas_agree() + shapes_agree()
        backends_agree()
    print(f"differs: {', '.join(wrong)}" if wrong else "the stand-in's contract is the official wheel's")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
