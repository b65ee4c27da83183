"""Sections of a run file as frozen models. An unknown key, a wrong type or an impossible value is an error.

Each section is one class. The comment at a field gives its meaning and unit. No check here depends on the world size.
`topology.plan` has the checks that do. This module imports nothing outside of `config` and `errors`.
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
    RemoteUrl,
    Section,
    SequenceLength,
    StepCount,
    StepRange,
    WarmupSteps,
)
from frontier_llm.config.model import ModelConfig, RopeScaling


class ParallelConfig(Section):
    """Degrees of the mesh, pipeline schedule, and sharding of the optimizer state."""

    tensor: Degree = 1  # tp, number of ranks that split each layer; on MI250X at most the devices of a node (8 GCDs).
    # Permit tensor-parallel groups that span nodes, for measurements; every layer then waits for the network.
    cross_node_tensor: bool = False
    pipeline: Degree = 1  # pp, number of pipeline ranks that split the layers.
    # dp, number of replicas that read different samples; None = world_size / (tp * cp * pp).
    data: Degree | None = None
    context: Degree = 1  # cp, number of ranks that split each sequence; the sequence length must be a multiple of 2 cp.
    context_attention: Literal["auto", "gather", "ring", "heads"] = "auto"  # Attention algorithm across cp ranks.
    # ep, number of ranks over which the experts are distributed; these are tensor and data ranks of one stage.
    expert: Degree = 1
    # etp, number of ranks that split each expert's width; independent of tensor, which splits attention.
    expert_tensor: Degree = 1
    # Copies of a token sent to another node: one for each of the token's experts there (flat), or only one
    # (hierarchical).
    expert_all_to_all: Literal["auto", "flat", "hierarchical"] = "auto"
    # Number of virtual stages per pipeline rank. More than 1 needs a schedule that supports them: interleaved, or a V
    # schedule (always 2).
    chunks: LayerCount = 1
    schedule: str = "1f1b"  # 1f1b, interleaved, zb-h1, zb-v, v-half, … (docs/schedules.md), or a registered schedule.
    # Megatron's sequence parallelism: tp ranks split the activations between blocks along the sequence.
    sequence_parallel: bool = False
    axis_order: str = "tp-dp-pp"  # Innermost axis first: neighbouring ranks differ in the first axis.
    # zero: parallel.zero controls how the optimizer state is split. fsdp: torch's fully_shard also splits the weights
    # over dp, without pipeline.
    data_mode: Literal["zero", "fsdp"] = "zero"
    # fsdp: number of neighbouring replicas that shard one copy of the weights; None = all.
    data_shard: Degree | None = None
    # 1 = the optimizer state is split over dp; 0 = every replica holds all of it. 2 and 3 occur in records of older
    # runs and are refused.
    zero: Literal[0, 1, 2, 3] = 1
    # Number of layers of each virtual stage, in order; None = balanced.
    stage_layers: tuple[LayerCount, ...] | None = None

    @property
    def model_ranks(self) -> int:
        """Number of ranks of one model replica. The world size is a multiple of this number."""
        return self.tensor * self.context * self.pipeline


class BatchConfig(Section):
    """Batch sizes in samples (sequences of model.sequence_length tokens)."""

    global_batch: GlobalBatch  # Number of samples in one optimizer step, over all ranks.
    micro_batch: MicroBatch = 1  # Number of samples that a stage of one replica processes at once.


class OptimizerConfig(Section):
    """Optimizer and learning-rate schedule. As in Megatron, weight decay applies to matrices, not to biases and
    norms.
    """

    # adamw, muon, lion, adafactor, or a registered optimizer (`blueprint.optimizers`).
    name: str = "adamw"
    # native: this program sums gradients and shards the optimizer state; deepspeed: DeepSpeed's ZeRO-1 does both.
    engine: Literal["native", "deepspeed"] = "native"
    # Path of a DeepSpeed JSON file that is passed to DeepSpeed; it may not contain settings that the run file
    # determines.
    deepspeed_config: str | None = None
    lr: PositiveFloat = 3e-4  # Highest learning rate, reached after warm-up.
    min_lr: NonNegativeFloat = 3e-5  # Learning rate at the end of the decay.
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)  # Decay of the first and second moment, per step.
    eps: PositiveFloat = 1e-8  # Added to the square root of the second moment.
    weight_decay: NonNegativeFloat = 0.1  # Decay of matrices per step, multiplied by the learning rate.
    clip_norm: NonNegativeFloat = 1.0  # Largest norm of the gradient; 0 = no clipping.
    # Course of the learning rate after warm-up; wsd stays at lr until its decay begins.
    schedule: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    warmup_steps: WarmupSteps = 0  # Steps in which the learning rate rises from 0 to lr, or "2B tokens".
    # cosine, linear: step at which the decay ends (None = train.steps); wsd: length of the decay.
    decay_steps: WarmupSteps | None = None
    momentum: BelowOne = 0.95  # muon: Nesterov momentum of the matrices.
    # muon: query, key and value weights form three matrices (together), or three for each key/value head (groups).
    heads: Literal["together", "groups"] = "together"

    @model_validator(mode="before")
    @classmethod
    def _drop_validated(cls, content: Any) -> Any:
        """Ignore `validated`, which older run files and checkpoints contain. Both values gave identical results."""
        if isinstance(content, Mapping) and content.get("validated") in ("before", "after"):
            return {key: value for key, value in content.items() if key != "validated"}
        return content


class PrecisionConfig(Section):
    """Working precision. Gradients are always accumulated and summed in fp32 (fp64 if dtype is fp64)."""

    # Type of the model's weights, activations and messages; fp64 is for tests. auto: bf16 on a GPU and on a CPU with
    # bf16 instructions, otherwise fp32; a resumed run keeps its type.
    dtype: Literal["auto", "fp32", "bf16", "fp16", "fp64"] = "bf16"
    # Type of gradients in the reduction between replicas; bf16 sends half the bytes of fp32.
    gradient_wire: Literal["full", "bf16"] = "full"
    # fp16: initial scale of the step's mean loss; None = 1024 for each token of the batch.
    initial_loss_scale: PositiveFloat | None = None
    loss_scale_window: PositiveInt = 1000  # fp16: number of steps without overflow after which the scale doubles.
    min_loss_scale: PositiveFloat = 1.0  # fp16: lower bound of the scale.


class DataSource(Section):
    """One dataset of a blend: prefix of its .bin/.idx files, and weight (normalised over the blend)."""

    path: PathText  # Path without .bin/.idx.
    weight: PositiveFloat = 1.0  # Share of the samples, relative to the other sources.
    # Largest number of epochs: a run whose phases together read this dataset more often is refused.
    max_epochs: PositiveFloat | None = None


Blend = tuple[DataSource, ...] | Literal["synthetic"]
SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]


def _sources(value: Any) -> Any:
    """Expand the short forms: one path is a blend with one source, and a list of paths has equal weights. A mapping of
    named sets is expanded for each set.
    """
    if isinstance(value, Mapping):
        return {name: _sources(one) for name, one in value.items()}
    paths = [value] if isinstance(value, str) and value != "synthetic" else value
    if isinstance(paths, (list, tuple)):
        return [{"path": item} if isinstance(item, str) else item for item in paths]
    return paths


class DataConfig(Section):
    """Token datasets by prefix (path without .bin/.idx), alone or in a list. `synthetic` needs no files and is meant
    for benchmarks.
    """

    # Training data: a path, a list of paths, or a list of {path, weight}.
    train: tuple[DataSource, ...] | Literal["synthetic"] = "synthetic"
    validation: tuple[DataSource, ...] | Literal["synthetic"] | Mapping[SetName, Blend] | None = (
        None  # Evaluation data, or {name: data, …} for several sets.
    )
    allow_synthetic: bool = False  # Permit a long and expensive run on synthetic data.
    tokenizer: PathText | None = None  # Sentencepiece .model, Hugging Face tokenizer.json, or hf://OWNER/NAME.
    reset_at_documents: bool = False  # True: attention does not cross document boundaries, and positions restart there.
    # Join documents and cut them at the sequence length (concatenate), or keep a document whole if it fits (best-fit).
    packing: Literal["concatenate", "best-fit"] = "concatenate"
    seed: NonNegativeInt = 1234  # Seed of the order of documents and samples.
    cache_dir: PathText | None = None  # Folder for sample indices; None = beside the data.

    _paths = field_validator("train", "validation", mode="before")(_sources)

    @property
    def splits(self) -> dict[str, Blend]:
        """Blends by split: train, and validation. Several validation sets are validation/NAME each, as in the names of
        their losses.
        """
        if self.validation is None:
            return {"train": self.train}
        if isinstance(self.validation, Mapping):
            return {"train": self.train, **{f"validation/{name}": blend for name, blend in self.validation.items()}}
        return {"train": self.train, "validation": self.validation}

    @property
    def held_out(self) -> dict[str, Blend]:
        """Splits that are not trained on. The loss of the first one is the run's held-out loss."""
        return {name: blend for name, blend in self.splits.items() if name != "train"}


class OpsConfig(Section):
    """Implementation of each fused op. `auto` selects the fastest available one, once, at start-up."""

    # Attention: softmax(q k) v.
    attention: Literal["auto", "reference", "sdpa", "cudnn", "cpu", "triton", "flash_attn"] = "auto"
    norm: Literal["auto", "reference", "cpu", "triton", "apex"] = "auto"  # LayerNorm and RMSNorm.
    rope: Literal["auto", "reference", "cpu", "triton"] = "auto"  # Rotation of queries and keys.
    activation: Literal["auto", "reference", "cpu", "triton"] = "auto"  # Non-linearity of the MLP, with bias or gate.
    cross_entropy: Literal["auto", "reference", "cpu", "triton"] = "auto"  # Loss over the vocabulary, which tp splits.
    adamw: Literal["auto", "reference", "cpu", "triton", "apex"] = "auto"  # Update of all weights by the optimizer.
    linear: Literal["auto", "reference", "cpu", "torch"] = "auto"  # Products with weights, and their gradients.
    # Sends tokens' rows to experts and multiplies them by the experts' weights.
    experts: Literal["auto", "reference", "cpu", "triton"] = "auto"
    accumulate: Literal["auto", "reference", "cpu", "triton"] = "auto"  # Adds gradients to the gradient buffers.
    # Attention kernels that `auto` selects: a table's name in configs/attention, or a file written by `ops tune`.
    attention_table: str = "shipped"
    # Use ops whose results are bitwise equal in two runs. `auto`: true if guard.recompute_interval is set.
    deterministic: Literal["auto"] | bool = "auto"
    # Let `auto` use far slower ops: on a GPU if the prebuilt kernels are missing, and on a CPU in fp16.
    allow_fallback: bool = False
    no_jit: bool = False  # Any attempt to compile during training is an error.


class TimeoutConfig(Section):
    """Seconds after which a collective or message of an axis fails. None = train.timeout_s."""

    tp: PositiveFloat | None = None  # Timeout of tensor-parallel collectives.
    cp: PositiveFloat | None = None  # Timeout of messages with keys and values between the ranks that split a sequence.
    pp: PositiveFloat | None = None  # Timeout of pipeline messages.
    dp: PositiveFloat | None = None  # Timeout of collectives of gradients and weights between replicas.
    ep: PositiveFloat | None = None  # Timeout of messages that send tokens to experts and back.
    edp: PositiveFloat | None = None  # Timeout of collectives of experts' gradients and weights between their replicas.
    tied: PositiveFloat | None = None  # Timeout of gradient sums of the embedding shared by first and last stage.
    world: PositiveFloat | None = None  # Timeout of collectives of all ranks.


class CommConfig(Section):
    """Communication between ranks."""

    # Backend of torch.distributed: gloo on CPUs, nccl (RCCL on ROCm) on GPUs.
    backend: Literal["auto", "gloo", "nccl", "mpi"] = "auto"
    # auto: shared memory between CPU ranks of one host, else torch.distributed.
    transport: Literal["auto", "shm", "torch"] = "auto"
    # Start the dp sum of a bucket during the last backward; False: after it, for comparison.
    overlap_gradients: bool = True
    # Overlap pipeline messages with compute; False: wait for each message in schedule order.
    overlap_messages: bool = True
    # Number of elements in a bucket of gradients or weights; the default is Megatron-LM's, 160 MB of fp32.
    bucket_elements: PositiveInt = 40_000_000
    # True: ZeRO's all-gather of updated weights ends at their first use in the next forward; False: within the step.
    overlap_weights: bool = False
    # Overlap expert communication with another microbatch, in schedules that pair microbatches (dualpipe-v).
    overlap_experts: bool = True
    # Number of pieces into which a tp collective is split, to overlap with its matrix product.
    tensor_chunks: PositiveInt = 1
    # Key-value store of the rendezvous; auto, direct and node mean torch's TCPStore.
    store: Literal["auto", "torch", "authenticated", "direct", "node"] = "auto"
    timeouts_s: TimeoutConfig = TimeoutConfig()  # Timeouts by axis.
    # Number of communications of a rank that may be in flight at a time; auto: the machine file's value.
    in_flight: Literal["auto", "one", "many"] = "auto"
    algorithms: str = "flat"  # flat, hierarchical, or a table: a name in configs/algorithms or a path.


class ProfileConfig(Section):
    """Steps for which torch.profiler writes a trace of compute, communication and waiting."""

    steps: StepRange  # First to last step, counted from 1: 10-12.
    ranks: tuple[NonNegativeInt, ...] = (0,)  # Global ranks that write a trace.
    memory_snapshot: bool = False  # GPU: also write the memory allocations, for pytorch.org/memory_viz.

    @field_validator("steps")
    @classmethod
    def _rising(cls, value: str) -> str:
        first, _, last = value.partition("-")
        if last and int(last) < int(first):
            raise ValueError(f"must not end before it starts; write {last}-{first}")
        return value

    @property
    def range(self) -> range:
        """The steps, counted from 1."""
        first, _, last = self.steps.partition("-")
        return range(int(first), int(last or first) + 1)


class PhaseModel(Section):
    """Keys of the model that a phase may change. None of them changes the shape of a weight."""

    sequence_length: SequenceLength | None = None  # S in this phase; None = model.sequence_length.
    rope_theta: PositiveFloat | None = None  # Base of the rotations in this phase; None = model.rope_theta.
    rope_scaling: RopeScaling | None = None  # Slower rotations in this phase; None = model.rope_scaling.


class PhaseBatch(Section):
    """Keys of the batch that a phase may change."""

    global_batch: GlobalBatch | None = None  # Number of samples in one step of this phase; None = batch.global_batch.
    micro_batch: MicroBatch | None = None  # Number of samples that a stage processes at once; None = batch.micro_batch.


class PhaseData(Section):
    """Keys of the data that a phase may change."""

    # Training data of this phase; None = data.train.
    train: tuple[DataSource, ...] | Literal["synthetic"] | None = None

    _paths = field_validator("train", mode="before")(_sources)


class PhaseConfig(Section):
    """A phase of a run: its length, and its differences from the rest of the run file (`config/phases.py`)."""

    steps: StepCount  # Number of optimizer steps, or text such as "20B tokens" or "2 epochs".
    model: PhaseModel = PhaseModel()
    batch: PhaseBatch = PhaseBatch()
    data: PhaseData = PhaseData()


RECOMPUTE = ("none", "selective", "full")  # selective: the attention core; full: everything but each block's input


def recompute_modes(value: Any) -> str:
    """Normalise `[full, none]` or `full,none` (command line) to "full,none". Raises ValueError for an unknown mode."""
    if isinstance(value, str):
        words: Sequence[Any] = value.split(",")
    elif isinstance(value, list | tuple):
        words = value
    else:
        words = [value]
    modes = [str(word).strip() for word in words]
    if not modes or set(modes) - set(RECOMPUTE):
        raise ValueError(
            "must be none, selective or full, or a list of them, which is repeated over the layers of each virtual "
            "stage"
        )
    return ",".join(modes)


Recompute = Annotated[str, BeforeValidator(recompute_modes)]

# Key of train.loss_weights: mean squared log-sum-exp of the model's logits over the targets that count (PaLM,
# arXiv:2204.02311).
OUTPUT_Z = "output-z"


class EvalTask(Section):
    """File of multiple-choice questions, as for `frontier-llm evaluate --task`. Written under a name as `{piqa:
    piqa.jsonl}` or with these keys.
    """

    # JSONL file in the format of LLM Foundry, or of lm-evaluation-harness for the supported tasks.
    path: PathText
    shots: NonNegativeInt = 0  # Number of solved examples before each question, from the same file.
    limit: NonNegativeInt = 0  # Number of questions; 0 = all.


def _tasks(value: Any) -> Any:
    """Expand a path alone to a task without examples."""
    if isinstance(value, Mapping):
        return {name: {"path": task} if isinstance(task, str) else task for name, task in value.items()}
    return value


class TrainConfig(Section):
    """Length of the run, its intervals, and the place of its results."""

    run_dir: PathText = "runs/default"  # Folder for records, logs and checkpoints.
    # Number of optimizer steps of the run, or "20B tokens", "2 epochs"; default with phases: the sum of their steps.
    steps: StepCount = 100
    # Phases with other data, batch or context; the last one extends to train.steps.
    phases: tuple[PhaseConfig, ...] = ()
    seed: NonNegativeInt = 1234  # Seed of the initial weights and of dropout's masks.
    # Activations that backward recomputes: none, selective (attention core), full (layers), or a list by layer.
    recompute: Recompute = "none"
    # Weights of additional loss terms: output-z, or a registered term (`model.losses.register`).
    loss_weights: Mapping[str, float] = {}
    log_interval: PositiveInt = 1  # Number of steps between two lines of the log.
    eval_interval: NonNegativeInt = 0  # Number of steps between two evaluations; 0 = only at the end.
    eval_samples: NonNegativeInt = 64  # Number of samples of each set of data.validation in each evaluation.
    # {piqa: piqa.jsonl, …}: multiple-choice questions for each evaluation.
    eval_tasks: Mapping[SetName, EvalTask] = {}
    save_interval: NonNegativeInt = 0  # Number of steps between two checkpoints; 0 = only at the end.
    # Save after the last step; False with save_interval=0: a stopped run saves no checkpoint either.
    save_final: bool = True
    # Number of steps that training may run after a save's copy; then it waits for the disk. None = save_interval / 10.
    save_lag_steps: NonNegativeInt | None = None
    keep_checkpoints: Annotated[int, Field(ge=2, le=1_000_000)] = 2  # Number of newest checkpoints that stay on disk.
    # Never delete a checkpoint whose step is a multiple of this number; 0 = delete all old checkpoints.
    keep_every: NonNegativeInt = 0
    # validation or validation/NAME: save each checkpoint with the best loss at once, keep it, and name it in BEST.
    keep_best: str | None = None
    # Folder of an object store to which each kept checkpoint is uploaded, e.g. s3://BUCKET/RUN (docs/object_store.md).
    remote: RemoteUrl | None = None
    remote_mib_per_s: NonNegativeFloat = 0.0  # Largest rate of the uploads in MiB per second; 0 = no limit.
    remote_wait_s: NonNegativeFloat = 600.0  # Longest time in seconds that a finished run waits for its last upload.
    tensorboard: bool = True  # Also write the metrics for TensorBoard.
    # Additional receivers of the metrics: wandb, mlflow, or a plugin's observer (`training.observers.register`).
    observers: tuple[str, ...] = ()
    profile: ProfileConfig | None = None  # Steps of which a trace is written; None = no trace.
    # auto: the GPU of the machine file, or the CPU if the machine file has no GPU. cpu: the CPU, without a check. cuda:
    # a GPU of any vendor.
    device: Literal["auto", "cpu", "cuda"] = "auto"
    peak_tflops: PositiveFloat | None = None  # Peak TFLOP/s of one device, for MFU; None = from the machine file.
    # Timeout of any collective in seconds; comm.timeouts_s overrides it for each axis.
    timeout_s: PositiveFloat = 600.0

    _eval_tasks = field_validator("eval_tasks", mode="before")(_tasks)


class GuardConfig(Section):
    """Checks during training, and the reaction to faults."""

    # Standard deviations above the mean of recent steps at which a loss or gradient norm is a spike; 0 = off.
    spike_sigmas: NonNegativeFloat = 0.0
    # Number of accepted steps over which the mean is taken.
    spike_window: Annotated[int, Field(ge=2, le=1_000_000)] = 128
    # Skip the update, or return to a checkpoint and leave the data of the spike out.
    spike_action: Literal["skip", "rewind"] = "skip"
    rewind_steps: PositiveInt = 100  # Return to a checkpoint at least this number of steps before the spike.
    rewind_skip_steps: PositiveInt = 200  # Steps after that checkpoint whose data is left out, at least to the spike.
    max_skips_in_row: PositiveInt = 100  # Consecutive skipped steps after which the run stops.
    # Number of steps between two checks in which all replicas compute one step twice, to find wrong results; 0 = never.
    recompute_interval: NonNegativeInt = 0
    # Largest number of steps between two comparisons of the ranks' compute times; 0 = never.
    straggler_interval: NonNegativeInt = 25
    # Longest time in seconds between two such comparisons. A rank is reported after two slow intervals.
    straggler_seconds: PositiveFloat = 300.0
    # Measure every node before the first step, and exclude slow nodes; auto = on 16 nodes and more.
    start_rates: Literal["auto"] | bool = "auto"
    # Number of steps between two comparisons of all copies of the weights, also compared before each save; 0 = never.
    replica_check_interval: NonNegativeInt = 100


class RunConfig(Section):
    """Root of a run file: the configuration of a complete run."""

    model: ModelConfig  # The transformer: the name or path of a model file, or its keys.
    parallel: ParallelConfig = ParallelConfig()
    batch: BatchConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    precision: PrecisionConfig = PrecisionConfig()
    data: DataConfig = DataConfig()
    ops: OpsConfig = OpsConfig()
    comm: CommConfig = CommConfig()
    train: TrainConfig = TrainConfig()
    guard: GuardConfig = GuardConfig()
    machine: str = "local"  # Name of a file in configs/machines, or the path of a machine file.
    # Modules or .py files that register schedules, optimizers, losses: docs/extending.md.
    plugins: tuple[str, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _durations(cls, content: Any, info: ValidationInfo) -> Any:
        return in_steps(content, info.context or ())
