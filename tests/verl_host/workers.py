"""verl's real training worker on the CPU, in one process without Ray: what tests of losses and workers share."""

import atexit
import os
import shutil
import tempfile
from contextlib import contextmanager
from functools import cache, partial

import torch
import torch.distributed as dist

os.environ["VERL_PLATFORM"] = "cpu"  # before verl asks for its platform

import verl  # noqa: F401

from metronome_verl import cpu

cpu.attach()

VOCABULARY = 97
LORA = {"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear"}


def ready(rank=0, world=1, store=None):
    """Makes this process a rank of a gloo group, as verl's workers expect to find it."""
    if dist.is_initialized():
        return
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0", RAY_LOCAL_WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # verl reads them; the store below is what meets
    store = dist.HashStore() if store is None else dist.FileStore(store, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


@cache
def model_folder():
    """A random Qwen2 of two layers, with a tokenizer of one word each."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    folder = tempfile.mkdtemp(prefix="metronome-workers-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    words = {f"w{i}": i for i in range(VOCABULARY)}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), pad_token="w0", eos_token="w1"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=False,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    ).save_pretrained(folder)
    return folder


def engine_config(strategy="fsdp2", **options):
    """fp32, packed rows, dynamic micro-batches of 96 tokens."""
    from verl.workers.config import FSDPEngineConfig

    settings = {
        "use_torch_compile": False,
        "use_dynamic_bsz": True,
        "max_token_len_per_gpu": 96,
        "infer_max_token_len_per_gpu": 96,
        "micro_batch_size_per_gpu": 2,
        "infer_micro_batch_size_per_gpu": 2,
        "model_dtype": "fp32",
        "mixed_precision": dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32"),
    }
    return FSDPEngineConfig(strategy=strategy, **{**settings, **options})


def actor_config(strategy="fsdp2", **options):
    """verl's ``ActorConfig``."""
    from verl.workers.config import FSDPActorConfig

    return FSDPActorConfig(
        strategy=strategy, rollout_n=4, ppo_micro_batch_size_per_gpu=2, fsdp_config=engine_config(strategy), **options
    )


def worker(strategy="fsdp2", lr=1e-2, model_options=None, **options):
    """Our worker around verl's engine, with the tiny model loaded; ``model_options`` are of verl's HFModelConfig."""
    ready()
    import torch.distributed.fsdp._init_utils as fsdp1

    # FSDP1 broadcasts weights at the start and asks for an accelerator to do it; gloo does it on the CPU.
    fsdp1._check_module_states_for_sync_module_states = lambda *_: None
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig

    from metronome_verl.worker import AccumulatingWorker

    model = HFModelConfig(
        path=model_folder(),
        use_remove_padding=True,
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "sdpa"},
        **(model_options or {}),
    )
    made = AccumulatingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=model,
            engine_config=engine_config(strategy, **options),
            optimizer_config=FSDPOptimizerConfig(
                lr=lr,
                total_training_steps=10,
                clip_grad=0.5,
                override_optimizer_config={"eps": 1e-3},  # AdamW's step isn't continuous at a gradient of zero
            ),
            checkpoint_config=CheckpointConfig(),
        )
    )
    made.reset()
    made.longest = 16
    return made


def stock_loss(config):
    """verl's own loss function."""
    from verl.workers.utils.losses import ppo_loss

    return partial(ppo_loss, config=config)


class Samples:
    """Eight rows of uneven length (row 3 with tool tokens), and any subset of them as verl's nested batch."""

    def __init__(self, rows=8, seed=3):
        draw = torch.Generator().manual_seed(seed)

        def tokens(count):
            return torch.randint(2, VOCABULARY, (count,), generator=draw)

        self.prompts = [tokens(4 + i % 3) for i in range(rows)]
        self.responses = [tokens(2 + (5 * i) % 13) for i in range(rows)]
        self.masks = [torch.ones(len(response), dtype=torch.long) for response in self.responses]
        self.masks[3][1:3] = 0
        self.advantages = [
            (-1.0) ** i * (0.5 + torch.rand(len(response), generator=draw)) for i, response in enumerate(self.responses)
        ]
        uniform = -torch.tensor(float(VOCABULARY)).log()
        self.behavior = [uniform + 0.3 * torch.randn(len(r), generator=draw) for r in self.responses]
        self.old = [uniform + 0.3 * torch.randn(len(r), generator=draw) for r in self.responses]
        self.reference = [uniform + 0.3 * torch.randn(len(r), generator=draw) for r in self.responses]
        self.extra_fields = [{"min_global_steps": 0, "max_global_steps": 0} for _ in self.responses]

    def batch(self, rows=None, *, padding=0, **extra):
        """The rows as a TensorDict, with ``padding`` rows as verl adds them."""
        from tensordict import NonTensorData, NonTensorStack, TensorDict
        from verl.utils import tensordict_utils as tu

        rows = list(range(len(self.prompts))) if rows is None else list(rows)
        pad, zero = torch.full((7,), 1), torch.zeros(1)

        def field(values, filler):
            return torch.nested.as_nested_tensor([values[i] for i in rows] + [filler] * padding, layout=torch.jagged)

        whole = [torch.cat(pair) for pair in zip(self.prompts, self.responses, strict=True)]
        made = TensorDict(
            {
                "input_ids": field(whole, torch.cat([pad, pad[:1]])),
                "position_ids": field([torch.arange(len(row)) for row in whole], torch.arange(8)),
                "prompts": field(self.prompts, pad),
                "responses": field(self.responses, pad[:1]),
                "response_mask": field(self.masks, zero.long()),
                "loss_mask": field(self.masks, zero.long()),
                "advantages": field(self.advantages, zero),
                "rollout_log_probs": field(self.behavior, zero),
                "old_log_probs": field(self.old, zero),
                "ref_log_prob": field(self.reference, zero),
            },
            batch_size=[len(rows) + padding],
        )
        fields = [self.extra_fields[i] for i in rows] + [self.extra_fields[0]] * padding
        made["extra_fields"] = NonTensorStack.from_list([NonTensorData(one) for one in fields])
        settings = {
            "temperature": 1.0,
            "calculate_entropy": True,
            "global_batch_size": len(self.prompts),
            "metronome_version": 0,
        }
        for key, value in {**settings, **extra}.items():
            tu.assign_non_tensor_data(made, key, value)
        return made


def gradient(made):
    """The accumulated gradient, one vector."""
    grads = [p.grad for p in made.engine.module.parameters() if p.grad is not None]
    return torch.cat([(g.full_tensor() if hasattr(g, "full_tensor") else g).flatten() for g in grads]).clone()


def weights(made):
    """The parameters, one vector."""
    values = [p.detach() for p in made.engine.module.parameters()]
    return torch.cat([(v.full_tensor() if hasattr(v, "full_tensor") else v).flatten() for v in values]).clone()


def fill(made, scale):
    """Values for LoRA's B, which starts at zero: that would hide the gradient of A and make the adapter nothing."""
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in made.engine.module.named_parameters():
            if "lora_B" in name:
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                local.copy_(scale * torch.randn(local.shape, generator=draw))


def merged(made):
    """Base plus adapter by name, as a model without LoRA calls its weights."""
    full = {
        name.removeprefix("base_model.model."): (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in made.engine.module.named_parameters()
    }
    found = {name.replace(".base_layer", ""): value for name, value in full.items() if "lora_" not in name}
    for name in list(found):
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_A.default.weight" in full:
            change = full[f"{layer}.lora_B.default.weight"] @ full[f"{layer}.lora_A.default.weight"]
            found[name] += LORA["lora_alpha"] / LORA["lora_rank"] * change
    return found


@contextmanager
def restored(made):
    """Weights, optimiser and schedule are put back afterwards."""
    engine = made.engine
    before = [p.detach().clone() for p in engine.module.parameters()]
    schedule = engine.lr_scheduler.state_dict()
    yield
    with torch.no_grad():
        for parameter, value in zip(engine.module.parameters(), before, strict=True):
            parameter.copy_(value)
    engine.optimizer.state.clear()
    engine.lr_scheduler.load_state_dict(schedule)
    engine.optimizer_zero_grad()
