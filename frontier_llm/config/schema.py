"""What a run is, as frozen strict models: an unknown key, a wrong type or an impossible value never gets past here.

Each section is one class; a comment after a field says what it means and in which unit. Nothing here is derived from
the world size: that is `topology.plan`. Nothing here imports anything of the package but its errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from frontier_llm.config.durations import in_steps
from frontier_llm.config.fields import (
    BelowOne,
    Degree,
    GlobalBatch,
    LayerCount,
    MicroBatch,
    NonNegativeFloat,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    Section,
    SequenceLength,
    StepCount,
    WarmupSteps,
)
from frontier_llm.config.model import ModelConfig, RopeScaling


class ParallelConfig(Section):
    """Degrees of the mesh and how the pipeline is played."""

    tensor: Degree = 1  # tp, ranks that split each layer; at most the devices of a node on MI250X (8 GCDs)
    pipeline: Degree = 1  # pp, ranks in a row that hold the layers
    data: Degree | None = None  # dp, replicas that read different samples; None = world_size / (tp * cp * pp)
    context: Degree = 1  # cp, ranks that split each sequence between them; its length is a multiple of 2 cp
    context_attention: Literal["auto", "gather", "ring", "heads"] = "auto"  # how they attend to each other
    # ep, ranks of a stage that share out the experts, folded out of tensor and data ranks
    expert: Degree = 1
    # etp, ranks that split each expert's width; attention's tensor has no say in it
    expert_tensor: Degree = 1
    # to nodes: a row per expert, or one per node
    expert_all_to_all: Literal["auto", "flat", "hierarchical"] = "auto"
    # virtual stages per pipeline rank; > 1 needs a schedule that takes them: interleaved; a V has 2
    chunks: LayerCount = 1
    schedule: str = "1f1b"  # see docs/schedules.md: 1f1b, interleaved, zb-h1, zb-v, v-half, …, or what was registered
    sequence_parallel: bool = False  # Megatron's: activations between blocks are split over tp along the sequence
    axis_order: str = "tp-dp-pp"  # innermost first: neighbouring ranks differ in the first axis
    # zero: see below; fsdp: torch's fully_shard, weights split over dp too, no pipeline
    data_mode: Literal["zero", "fsdp"] = "zero"
    # fsdp: neighbouring replicas that share out one copy of the weights; None = all
    data_shard: Degree | None = None
    # 1 = the optimizer state is split over dp; 2 and 3 stand in records of older runs and are refused
    zero: Literal[0, 1, 2, 3] = 1
    stage_layers: tuple[LayerCount, ...] | None = None  # layers of each virtual stage in order; None = balanced

    @property
    def model_ranks(self) -> int:
        """Ranks that one replica of the data takes: what the world size is a multiple of."""
        return self.tensor * self.context * self.pipeline


class BatchConfig(Section):
    """Batch sizes in samples (sequences of model.sequence_length tokens)."""

    global_batch: GlobalBatch  # samples of one optimizer step, over all ranks
    micro_batch: MicroBatch = 1  # samples that pass a stage at once, on one replica


class OptimizerConfig(Section):
    """The optimizer and its learning-rate schedule; decay as Megatron has it (matrices yes; biases, norms no)."""

    # or muon, lion, adafactor, or what was registered; checked by the registry in blueprint.optimizers
    name: str = "adamw"
    # who sums gradients and splits the state: this program, or DeepSpeed's ZeRO-1
    engine: Literal["native", "deepspeed"] = "native"
    deepspeed_config: str | None = None  # a DeepSpeed JSON that is passed on; keys that this file decides are refused
    lr: PositiveFloat = 3e-4  # the highest learning rate, after warm-up
    min_lr: NonNegativeFloat = 3e-5  # where the decay ends
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)  # decay of the first and second moment, per step
    eps: PositiveFloat = 1e-8  # added to the root of the second moment
    weight_decay: NonNegativeFloat = 0.1  # of matrices, times the learning rate, per step
    clip_norm: NonNegativeFloat = 1.0  # 0 = no clipping
    # after warm-up; wsd stays at lr until its decay
    schedule: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    warmup_steps: WarmupSteps = 0  # steps in which the learning rate rises from 0 to lr, or "2B tokens"
    decay_steps: WarmupSteps | None = None  # cosine/linear: end of decay (None = train.steps); wsd: length of the decay
    momentum: BelowOne = 0.95  # of muon's matrices, Nesterov's
    # muon: q, k, v as a matrix each, or one of each per key/value head
    heads: Literal["together", "groups"] = "together"

    @model_validator(mode="before")
    @classmethod
    def _drop_validated(cls, content: Any) -> Any:
        """Ignore `validated`, which older run files and checkpoints have: both values gave the same bits."""
        if isinstance(content, Mapping) and content.get("validated") in ("before", "after"):
            return {key: value for key, value in content.items() if key != "validated"}
        return content


class PrecisionConfig(Section):
    """Working precision; gradients always accumulate and are summed in fp32 (fp64 under fp64)."""

    # of weights in the model, activations and messages; fp64 is for tests
    dtype: Literal["fp32", "bf16", "fp16", "fp64"] = "bf16"
    # what gradients travel as between replicas; bf16: half the bytes of fp32
    gradient_wire: Literal["full", "bf16"] = "full"
    # fp16 only, of the step's mean loss; None = 1024 for each token of the batch
    initial_loss_scale: PositiveFloat | None = None
    loss_scale_window: PositiveInt = 1000  # fp16: steps without overflow before the scale doubles
    min_loss_scale: PositiveFloat = 1.0  # fp16: an overflow never makes the scale smaller


class DataSource(Section):
    """One member of a blend: a .bin/.idx prefix and its weight (normalised over the blend)."""

    path: PathText  # prefix: the path without .bin/.idx
    weight: PositiveFloat = 1.0  # share of the samples, relative to the other sources
    # a run that goes through it more often, over all its phases, is refused
    max_epochs: PositiveFloat | None = None


Blend = tuple[DataSource, ...] | Literal["synthetic"]
SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]


def _sources(value: Any) -> Any:
    """A path alone stands for a blend of one, a list of paths for equal parts; so in each of several sets."""
    if isinstance(value, Mapping):
        return {name: _sources(one) for name, one in value.items()}
    paths = [value] if isinstance(value, str) and value != "synthetic" else value
    if isinstance(paths, (list, tuple)):
        return [{"path": item} if isinstance(item, str) else item for item in paths]
    return paths


class DataConfig(Section):
    """Token datasets by prefix (path without .bin/.idx), alone or in a list; `synthetic` needs no files and suits
    benchmarks.
    """

    # what is trained on; a path, a list of paths, or of {path, weight}
    train: tuple[DataSource, ...] | Literal["synthetic"] = "synthetic"
    validation: tuple[DataSource, ...] | Literal["synthetic"] | Mapping[SetName, Blend] | None = (
        None  # what is evaluated on, or {name: it, …}
    )
    allow_synthetic: bool = False  # a long and costly run on synthetic data is meant
    tokenizer: PathText | None = None  # sentencepiece .model, Hugging Face tokenizer.json, or hf://OWNER/NAME
    reset_at_documents: bool = False  # attention and positions do not cross document boundaries
    # documents end to end and cut, or kept whole where they fit
    packing: Literal["concatenate", "best-fit"] = "concatenate"
    seed: NonNegativeInt = 1234  # decides the order of documents and samples
    cache_dir: PathText | None = None  # sample indices; None = beside the data

    _paths = field_validator("train", "validation", mode="before")(_sources)

    @property
    def splits(self) -> dict[str, Blend]:
        """train; validation, or of several sets validation/NAME each, as their losses are called."""
        if self.validation is None:
            return {"train": self.train}
        if isinstance(self.validation, Mapping):
            return {"train": self.train, **{f"validation/{name}": blend for name, blend in self.validation.items()}}
        return {"train": self.train, "validation": self.validation}

    @property
    def held_out(self) -> dict[str, Blend]:
        """The splits that are not trained on; the first one's loss is the run's held-out loss."""
        return {name: blend for name, blend in self.splits.items() if name != "train"}


class OpsConfig(Section):
    """Which implementation of each fused op; `auto` takes the fastest that is present, once, at start-up."""

    attention: Literal["auto", "reference", "sdpa", "cudnn", "cpu", "triton", "flash_attn"] = "auto"  # softmax(q k) v
    norm: Literal["auto", "reference", "cpu", "triton", "apex"] = "auto"  # LayerNorm and RMSNorm
    rope: Literal["auto", "reference", "cpu", "triton"] = "auto"  # rotation of queries and keys
    activation: Literal["auto", "reference", "cpu", "triton"] = "auto"  # the MLP's non-linearity, with bias or gate
    cross_entropy: Literal["auto", "reference", "cpu", "triton"] = "auto"  # loss over the vocabulary that tp splits
    adamw: Literal["auto", "reference", "cpu", "triton", "apex"] = "auto"  # the optimizer's update of all weights
    linear: Literal["auto", "reference", "cpu", "torch"] = "auto"  # products with weights and their gradients
    # tokens' rows to experts, products with their weights
    experts: Literal["auto", "reference", "cpu", "triton"] = "auto"
    accumulate: Literal["auto", "reference", "cpu", "triton"] = "auto"  # sums into the gradient buffers
    # what `auto` takes for attention: a name in configs/attention, or what ops tune wrote
    attention_table: str = "shipped"
    # on a GPU, `auto` goes on, far slower, where its prebuilt kernels are missing
    allow_fallback: bool = False
    no_jit: bool = False  # any attempt to compile while training is an error


class TimeoutConfig(Section):
    """Seconds after which a collective or message of an axis fails; None = train.timeout_s."""

    tp: PositiveFloat | None = None  # tensor parallelism
    cp: PositiveFloat | None = None  # keys and values between the ranks that split a sequence
    pp: PositiveFloat | None = None  # messages of the pipeline
    dp: PositiveFloat | None = None  # gradients and weights between replicas
    ep: PositiveFloat | None = None  # tokens on their way to experts and back
    edp: PositiveFloat | None = None  # experts' gradients and weights between their replicas
    tied: PositiveFloat | None = None  # the embedding that the first and the last stage share
    world: PositiveFloat | None = None  # what all ranks do together


class CommConfig(Section):
    """How bytes move between ranks."""

    # torch.distributed's: gloo on CPUs, nccl (= RCCL on ROCm) on GPUs
    backend: Literal["auto", "gloo", "nccl", "mpi"] = "auto"
    # auto: shared memory between CPU ranks of one host, else torch.distributed
    transport: Literal["auto", "shm", "torch"] = "auto"
    # a bucket's sum over dp starts under the last backward; False: after it, for comparison
    overlap_gradients: bool = True
    # pipeline messages go on under the compute beside them; False: each is waited for where the order has it
    overlap_messages: bool = True
    # of a bucket of gradients and weights; Megatron-LM's default, 160 MB of fp32
    bucket_elements: PositiveInt = 40_000_000
    # ZeRO's gather of a bucket's weights ends at its first use in the next forward; False: with the step
    overlap_weights: bool = False
    # rows to experts travel beside another microbatch, in schedules that pair them: dualpipe-v
    overlap_experts: bool = True
    tensor_chunks: PositiveInt = 1  # pieces in which tensor parallelism gathers, scatters and sums beside its products
    # where ranks meet; auto, direct, node: torch's TCPStore
    store: Literal["auto", "torch", "authenticated", "direct", "node"] = "auto"
    timeouts_s: TimeoutConfig = TimeoutConfig()  # by axis
    # communications at a time; auto: as the machine file says
    in_flight: Literal["auto", "one", "many"] = "auto"
    algorithms: str = "flat"  # flat, hierarchical, or a table: a name in configs/algorithms or a path


class ProfileConfig(Section):
    """Steps whose trace is written: what each rank computes, sends and waits for, by torch.profiler."""

    steps: Annotated[
        str, BeforeValidator(str), Field(pattern=r"^[1-9]\d*(-[1-9]\d*)?$")
    ]  # counted from 1, first to last: 10-12
    ranks: tuple[NonNegativeInt, ...] = (0,)  # global ranks that write one
    memory_snapshot: bool = False  # on a GPU also its allocations, for pytorch.org/memory_viz

    @field_validator("steps")
    @classmethod
    def _rising(cls, value: str) -> str:
        first, _, last = value.partition("-")
        if last and int(last) < int(first):
            raise ValueError(f"goes backwards; write {last}-{first}")
        return value

    @property
    def range(self) -> range:
        """The steps, counted from 1."""
        first, _, last = self.steps.partition("-")
        return range(int(first), int(last or first) + 1)


class PhaseModel(Section):
    """Of the model, what a phase may change: nothing that has weights."""

    sequence_length: SequenceLength | None = None  # S in this phase; None = model.sequence_length
    rope_theta: PositiveFloat | None = None  # base of its rotations; None = model.rope_theta
    rope_scaling: RopeScaling | None = None  # how they are slowed down; None = model.rope_scaling


class PhaseBatch(Section):
    """Of the batch: all of it."""

    global_batch: GlobalBatch | None = None  # samples of one step of this phase; None = batch.global_batch
    micro_batch: MicroBatch | None = None  # samples that pass a stage at once; None = batch.micro_batch


class PhaseData(Section):
    """Of the data: what is trained on."""

    # this phase's blend; None = data.train
    train: tuple[DataSource, ...] | Literal["synthetic"] | None = None

    _paths = field_validator("train", mode="before")(_sources)


class PhaseConfig(Section):
    """A stretch of a run: how long it lasts, and what is other in it than the rest of the run file says
    (`config/phases.py`).
    """

    steps: StepCount  # optimizer steps, or as text "20B tokens", "2 epochs"
    model: PhaseModel = PhaseModel()
    batch: PhaseBatch = PhaseBatch()
    data: PhaseData = PhaseData()


RECOMPUTE = ("none", "selective", "full")  # selective: the attention core; full: everything but each block's input


def recompute_modes(value: Any) -> str:
    """`[full, none]`, or `full,none` as on the command line, as "full,none"."""
    if isinstance(value, str):
        words: Sequence[Any] = value.split(",")
    elif isinstance(value, list | tuple):
        words = value
    else:
        words = [value]
    modes = [str(word).strip() for word in words]
    if not modes or set(modes) - set(RECOMPUTE):
        raise ValueError(
            "must be none, selective or full, or a list of them, which repeats through each virtual stage's layers"
        )
    return ",".join(modes)


Recompute = Annotated[str, BeforeValidator(recompute_modes)]

# of train.loss_weights: mean squared log-sum-exp of the model's logits, over the targets that count (PaLM,
# arXiv:2204.02311)
OUTPUT_Z = "output-z"


class EvalTask(Section):
    """Under its name, a file of multiple-choice questions, as `frontier-llm evaluate --task` takes it: `{piqa:
    piqa.jsonl}`, or these keys.
    """

    # JSONL: LLM Foundry's form, or that of lm-evaluation-harness for the tasks that it is known for
    path: PathText
    shots: NonNegativeInt = 0  # solved examples before each question, from the same file
    limit: NonNegativeInt = 0  # questions; 0 = all


def _tasks(value: Any) -> Any:
    """A path alone is a task without examples."""
    if isinstance(value, Mapping):
        return {name: {"path": task} if isinstance(task, str) else task for name, task in value.items()}
    return value


class TrainConfig(Section):
    """How long, how often, and where the results go."""

    run_dir: PathText = "runs/default"  # where records, logs and checkpoints go
    # optimizer steps of the whole run, or "20B tokens", "2 epochs"; with phases: the sum of theirs
    steps: StepCount = 100
    # stretches with other data, batch or context; the last goes on to train.steps
    phases: tuple[PhaseConfig, ...] = ()
    seed: NonNegativeInt = 1234  # initial weights, and dropout's masks
    # by backward, not kept: none, selective (attention's inside), full (layers), or a list of these by layer
    recompute: Recompute = "none"
    # of further loss terms: output-z, or what was registered (model.losses.register)
    loss_weights: Mapping[str, float] = {}
    log_interval: PositiveInt = 1  # steps between lines of the log
    eval_interval: NonNegativeInt = 0  # steps; 0 = only at the end
    eval_samples: NonNegativeInt = 64  # of each set of data.validation, in each evaluation
    # {piqa: piqa.jsonl, …}: multiple-choice questions, asked in each evaluation
    eval_tasks: Mapping[SetName, EvalTask] = {}
    save_interval: NonNegativeInt = 0  # steps; 0 = only at the end
    # a checkpoint after the last step; False with save_interval=0: none when stopped either
    save_final: bool = True
    # after its copy, until training waits for a save not yet on disk; None = interval / 10
    save_lag_steps: NonNegativeInt | None = None
    keep_checkpoints: Annotated[int, Field(ge=2, le=1_000_000)] = 2  # newest ones that stay on disk
    keep_every: NonNegativeInt = 0  # steps; checkpoints at its multiples are never deleted; 0 = none
    # validation, or validation/NAME: a better one is saved at once, kept, and named in BEST
    keep_best: str | None = None
    tensorboard: bool = True  # also write the metrics for TensorBoard
    # who else follows the run: wandb, mlflow, or a plugin's (train.observers.register)
    observers: tuple[str, ...] = ()
    profile: ProfileConfig | None = None  # steps whose trace is written; None = none
    # auto: the GPU that the machine file states; cpu: without any check; cuda: also ROCm
    device: Literal["auto", "cpu", "cuda"] = "auto"
    peak_tflops: PositiveFloat | None = None  # of one device, for MFU; None = from the machine file
    timeout_s: PositiveFloat = 600.0  # of any collective; comm.timeouts_s has one for each axis

    _eval_tasks = field_validator("eval_tasks", mode="before")(_tasks)


class GuardConfig(Section):
    """What the run watches for, and what it does about it."""

    # a step whose loss or gradient norm is this far above the last ones' mean is a spike; 0 = off
    spike_sigmas: NonNegativeFloat = 0.0
    spike_window: Annotated[int, Field(ge=2, le=1_000_000)] = 128  # accepted steps that make the mean
    spike_action: Literal["skip", "rewind"] = "skip"  # leave the step out; or go back and leave data out
    rewind_steps: PositiveInt = 100  # go back at least so far before the spike
    rewind_skip_steps: PositiveInt = 200  # steps' worth of data that is left out, counted from where it went back to
    max_skips_in_row: PositiveInt = 100  # skipped steps after which the run stops
    # steps between computing one step twice on all replicas, to find wrong arithmetic; 0 = never
    recompute_interval: NonNegativeInt = 0
    # steps between comparisons of how long each rank computes; 0 = never
    straggler_interval: NonNegativeInt = 25
    # steps between comparisons of all copies, also before each save; 0 = never
    replica_check_interval: NonNegativeInt = 100


class RunConfig(Section):
    """A whole run; the root of a run file."""

    model: ModelConfig  # the transformer: a name, a path, or keys
    parallel: ParallelConfig = ParallelConfig()
    batch: BatchConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    precision: PrecisionConfig = PrecisionConfig()
    data: DataConfig = DataConfig()
    ops: OpsConfig = OpsConfig()
    comm: CommConfig = CommConfig()
    train: TrainConfig = TrainConfig()
    guard: GuardConfig = GuardConfig()
    machine: str = "local"  # name of a file in configs/machines, or a path
    # modules or .py files that register schedules, optimizers, losses: docs/extending.md
    plugins: tuple[str, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _durations(cls, content: Any, info: ValidationInfo) -> Any:
        return in_steps(content, info.context or ())
