"""verl's real Megatron engine on a CPU and gloo: what Megatron-core and mbridge ask of a GPU is answered in its place.

The answers are of the tests only. Tensors for a GPU are made on the CPU, a GPU's random state isn't forked (there is no
dropout), layers are Megatron-core's own instead of Transformer Engine's, and their attention is torch's, which reads
packed rows as Transformer Engine's does. Verl's engine, its schedule, its buffers and its optimiser are untouched.
"""

from __future__ import annotations

import atexit
import contextlib
import shutil
import tempfile
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
import workers
from torch import Tensor
from torch.overrides import TorchFunctionMode

from metronome.shared_prompt.options import SharedPromptOptions
from metronome.shared_prompt.plan import SharedPromptPlan
from metronome.shared_prompt.reference import ReferenceBackend
from metronome_verl.engine import building

LOSS = {"entropy_coeff": 0.05, "use_kl_loss": True, "kl_loss_coef": 0.1, "loss_scale_factor": 16}
SPLIT = ([0, 1], [2, 3, 4], [5], [6, 7])
_PLAIN = (
    "bias_dropout_fusion",
    "masked_softmax_fusion",
    "apply_rope_fusion",
    "gradient_accumulation_fusion",
    "persist_layer_norm",
)


class OnCpu(TorchFunctionMode):
    """What asks for a GPU gets the CPU, and a tensor's type says what Megatron's optimiser expects."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        return args[0] if func is torch.Tensor.cuda else func(*args, **kwargs)


class PlainNorm(torch.nn.Module):
    """RMSNorm for sequence parallelism, which Megatron's wrapper around torch's refuses."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **others: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        self.weight.sequence_parallel = config.sequence_parallel
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *others: Any, **options: Any) -> Tensor:
    """Causal attention, ``[s,b,n,d] -> [s,b,n d]``, or of packed rows, ``[t,n,d] -> [t,n d]``."""

    def one(*row: Tensor) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in row)
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return found.permute(2, 0, 1, 3).flatten(2)

    packed = options.get("packed_seq_params")
    if packed is None:
        return one(query, key, value)
    ends = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    rows = zip(*(x[:, None].split(ends.diff().tolist()) for x in (query, key, value)), strict=True)
    return torch.cat([one(*row) for row in rows])[:, 0]


def _layers(bridge: Any, vp_stage: int | None = None) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    bridge.has_vp_stage = True
    block = get_gpt_decoder_block_spec(bridge.config, use_transformer_engine=False, vp_stage=vp_stage)
    block.layer_norm = PlainNorm
    for layer in block.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = PlainNorm
    return block


@contextlib.contextmanager
def furnished() -> Any:
    """Inside, verl's Megatron engine can be built and run; this process is a rank of a gloo group already."""
    from megatron.core import tensor_parallel
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.moe import moe_utils
    from verl.models.mcore import mbridge  # noqa: F401  (verl's changes to mbridge come first)
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.megatron import MegatronEngineWithLMHead

    # isort: split
    from mbridge.core.llm_bridge import LLMBridge
    from mbridge.models.qwen2 import Qwen2Bridge

    tracker = SimpleNamespace(fork=lambda *args, **options: contextlib.nullcontext())
    norm = {"pre_mlp_layernorm.weight": ["model.layers.{layer_number}.post_attention_layernorm.weight"]}
    other = {"input_layernorm.weight": ["model.layers.{layer_number}.input_layernorm.weight"]}
    with pytest.MonkeyPatch.context() as patch, OnCpu():
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        patch.setattr(torch.cuda, "synchronize", lambda *args: None)
        patch.setattr(torch.nn.Module, "cuda", lambda module, *args: module)
        patch.setattr(torch._dynamo.config, "disable", True)
        patch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda *args, **options: tracker)
        patch.setattr(tensor_parallel, "model_parallel_cuda_manual_seed", lambda *args, **options: None)
        patch.setattr(moe_utils, "te_general_gemm", None, raising=False)  # 0.16.1 reads it without defining it
        patch.setattr(DotProductAttention, "forward", _attention)
        patch.setattr(LLMBridge, "_get_transformer_layer_spec", _layers)
        patch.setattr(Qwen2Bridge, "_MLP_MAPPING", {**Qwen2Bridge._MLP_MAPPING, **norm})
        patch.setattr(Qwen2Bridge, "_OTHER_MAPPING", other, raising=False)
        patch.setattr(Qwen2Bridge, "_DIRECT_MAPPING", dict(Qwen2Bridge._DIRECT_MAPPING))
        patch.setitem(EngineRegistry._engines["language_model"]["megatron"], "cpu", MegatronEngineWithLMHead)
        yield


@cache
def model_folder(tied: bool = False) -> str:
    """The tiny model of the other tests with an even vocabulary, as two ranks split it; one matrix if ``tied``."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = tempfile.mkdtemp(prefix="metronome-megatron-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shutil.copytree(workers.model_folder(), folder, dirs_exist_ok=True)
    torch.manual_seed(0)
    config = Qwen2Config.from_pretrained(folder, tie_word_embeddings=tied, vocab_size=workers.VOCABULARY + 1)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def worker(loss: Any, remove_padding: bool = True, tied: bool = False, **options: Any) -> Any:
    """Our worker around verl's Megatron engine, fp32, with the tiny model loaded by mbridge."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig, TrainingWorkerConfig

    from metronome_verl.worker import AccumulatingWorker

    engine = McoreEngineConfig(
        vanilla_mbridge=True,
        use_dynamic_bsz=True,
        max_token_len_per_gpu=96,
        infer_max_token_len_per_gpu=96,
        micro_batch_size_per_gpu=2,
        infer_micro_batch_size_per_gpu=2,
        override_transformer_config={"use_cpu_initialization": True, **dict.fromkeys(_PLAIN, False)},
        **options,
    )
    object.__setattr__(engine, "dtype", "float32")  # verl asks for half precision; equalities need more
    made = AccumulatingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(path=model_folder(tied), use_remove_padding=remove_padding),
            engine_config=engine,
            optimizer_config=McoreOptimizerConfig(
                lr=1e-2,
                total_training_steps=10,
                clip_grad=0.4,
                override_optimizer_config={"adam_eps": 1e-3},  # Adam's step isn't continuous at a gradient of zero
            ),
            checkpoint_config=CheckpointConfig(),
        )
    )
    made.reset()
    made.longest = 16
    made.set_loss_fn(loss)
    return made


def gradient(made: Any) -> Tensor:
    """This rank's share of the finalised gradient, one vector: all of it without the distributed optimiser."""
    found = []
    for chunk in made.engine.module:
        group, sharded = chunk.dp_group, chunk.ddp_config.use_distributed_optimizer
        ranks, rank = (
            (torch.distributed.get_world_size(group), torch.distributed.get_rank(group)) if sharded else (1, 0)
        )
        found += [
            bucket.grad_data.chunk(ranks)[rank].clone() for part in chunk.bucket_groups for bucket in part.buckets
        ]
    return torch.cat(found)


def weights(made: Any) -> Tensor:
    """The parameters of this rank, one vector."""
    return torch.cat([one.detach().flatten() for chunk in made.engine.module for one in chunk.parameters()]).clone()


@contextlib.contextmanager
def watched(made: Any) -> Any:
    """Around one optimiser step: the gradient before the clip, in a dictionary."""
    seen: dict[str, Any] = {}
    step = made.engine.optimizer_step

    def watch() -> Any:
        seen["gradient"] = gradient(made)
        return step()

    made.engine.optimizer_step = watch
    yield seen
    del made.engine.optimizer_step


def gap(found: Tensor, wanted: Tensor) -> float:
    """The largest difference over the largest value."""
    return float((found - wanted).abs().max() / wanted.abs().max())


class OneWrongKey(ReferenceBackend):
    """The reference, except that one token's key and value are its neighbour's; it isn't checked at the first use."""

    options = SharedPromptOptions(self_check=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: SharedPromptPlan, scale: float, **others: Any) -> Tensor:
        rows = torch.arange(plan.tokens)
        rows[2] = 3
        return super().attend(q, k[rows], v[rows], plan, scale, **others)


def sharing(loss: Any, backend: Any = None, **options: Any) -> Any:
    """``worker`` with our engine in verl's place."""
    import metronome_verl.megatron_engine  # noqa: F401  (registers itself)

    with building(backend or ReferenceBackend()) as engines:
        made = worker(loss, **options)
    assert engines == [made.engine]
    made.attends = True
    return made


def grouped() -> workers.Samples:
    """Four groups of two rows."""
    samples = workers.Samples()
    for row in range(1, len(samples.prompts), 2):
        samples.prompts[row] = samples.prompts[row - 1]
    return samples
