"""The schema: every field of a configuration (`data` in data.py, what is kept
and watched in safety.py), documented once, with its unit.

`run.py help config` prints this file's documentation. A field is read somewhere, or is not here.
"""

import dataclasses

from jaxtpu.config.data import DataConfig
from jaxtpu.config.duration import Duration
from jaxtpu.config.remat import POLICIES, TENSORS
from jaxtpu.config.safety import CheckpointConfig, GuardConfig, WatchdogConfig
from jaxtpu.config.section import Section, option, subsection
from jaxtpu.config.text import MixtureConfig, TextConfig
from jaxtpu.config.vision import ImagesConfig, VisionConfig

_DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass
class ModelConfig(Section, path="model"):
    """The model."""

    name: str = option(
        "transformer",
        "which model of the registry (jaxtpu/models): transformer reads text; vit, resnet, mixer and "
        "mlp read images",
    )
    vocab_size: int = option(0, "ids of the vocabulary; 0 takes the tokenizer's", at_least=0)
    vocab_multiple: int = option(
        128,
        "the embedding and the logits are padded to a multiple of this (a TPU tile is 128 lanes "
        "wide); padded ids never get probability", at_least=1,
    )  # fmt: skip
    embed: int = option(256, "width of the residual stream, features", at_least=1)
    layers: int = option(4, "decoder layers", at_least=1)
    heads: int = option(4, "query heads", at_least=1)
    kv_heads: int = option(0, "key and value heads; 0 means as many as heads", at_least=0)
    head_dim: int = option(0, "features a head; 0 means embed / heads", at_least=0)
    mlp: int = option(1024, "hidden features of the MLP", at_least=1)
    mlp_multiple: int = option(
        1,
        "the MLP is padded to a multiple of this with features that are 0 and stay 0; 128 (lanes of "
        "a tile) x mesh.tensor lets tensor divide any model.mlp", at_least=1,
    )  # fmt: skip
    tied_embeddings: bool = option(False, "the output projection shares the embedding's weights")
    rope_theta: float = option(10_000.0, "base of the rotary position angles", at_least=1.0)
    norm_epsilon: float = option(1e-6, "added to the mean square in RMSNorm", at_least=0.0)
    init_std: float = option(
        0.02, "standard deviation of the initial embedding; kernels use 1 / sqrt(inputs)",
        at_least=0.0,
    )  # fmt: skip
    attention: str = option(
        "auto",
        "attention implementation: xla (plain; memory is quadratic in the sequence), blockwise "
        "(online softmax in XLA; linear), flash (our kernel, for TPU v2 and v3; linear), splash "
        "(JAX's kernel, TPU v4 and later; linear); auto takes the best that the device compiles",
        choices=("auto", "xla", "blockwise", "flash", "splash"),
    )
    remat: str = option(
        "full",
        "what the backward pass recomputes: none (keep all activations), full (keep each layer's "
        "input only), save_attention_out (keep attention's result too, so that its kernel runs "
        "once), save_qkv (its arguments), save_attention (both), dots (the results of matrix "
        "products with weights)",
        choices=POLICIES,
    )
    remat_tensors: tuple[str, ...] = option(
        (),
        "tensors of a layer that are treated otherwise than model.remat says, as NAME=save, "
        "NAME=offload (to the host's memory; where there is none, it is kept) or NAME=remat; names: "
        f"{', '.join(TENSORS)}",
    )
    remat_group: int = option(
        1,
        "layers of which the forward pass keeps the first one's input only; the backward pass runs "
        "them again together, and model.remat says what it keeps of them: near the square root of "
        "model.layers it takes the least memory, for one more forward pass; 1 for none of this",
        at_least=1,
    )
    text: TextConfig = subsection(TextConfig)
    moe: MixtureConfig = subsection(MixtureConfig)
    vision: VisionConfig = subsection(VisionConfig)


@dataclasses.dataclass
class MeshConfig(Section, path="mesh", word="auto"):
    """The device mesh, outermost axis first. One axis may be -1: it takes the devices left."""

    auto: bool = option(
        False,
        "take mesh, remat, attention, microbatches and the optimizer's placement from a plan for "
        "the devices present, as far as nothing else sets them; mesh=auto sets this",
    )

    data: int = option(1, "replicas of the parameters, each with its own part of the batch")
    fsdp: int = option(-1, "parts of the parameters; each part also has its own part of the batch")
    expert: int = option(1, "parts of the experts; the batch is divided over it too")
    context: int = option(1, "parts of the sequence")
    tensor: int = option(1, "parts of each layer's heads, MLP features and vocabulary")
    emulate: int = option(8, "CPU devices to emulate where there is no accelerator", at_least=1)


@dataclasses.dataclass
class ShardingConfig(Section, path="sharding"):
    """The rule table: which mesh axes divide each logical axis that models name.

    Several mesh axes are joined by commas; an empty string means undivided. Where two dimensions
    of one array ask for the same mesh axis, the left one has it.
    """

    batch: str = option("data,fsdp,expert", "examples")
    sequence: str = option("context", "tokens of a sequence")
    residual: str = option("context,tensor", "tokens of the residual stream between layers")
    layers: str = option("", "stacked layers")
    embed: str = option("fsdp", "residual stream features (in activations the batch has fsdp)")
    mlp: str = option("tensor", "hidden features of the MLP")
    heads: str = option("tensor", "query heads")
    kv_heads: str = option("tensor", "key and value heads")
    head_dim: str = option("", "features of a head")
    vocab: str = option("tensor", "vocabulary")
    experts: str = option("expert", "experts of a mixture")
    max_replicated: float = option(
        0.02,
        "training does not start if more than this fraction of the parameter bytes is undivided "
        "on a mesh that should divide them (fsdp, expert or tensor above 1)",
        at_least=0.0,
    )


@dataclasses.dataclass
class PrecisionConfig(Section, path="precision"):
    """Number formats. Softmax, norms and the loss are computed in float32 whatever these say."""

    params: str = option("float32", "parameters", choices=_DTYPES)
    compute: str = option("bfloat16", "activations and matrix products", choices=_DTYPES)
    accumulate: str = option("float32", "gradients summed over microbatches", choices=_DTYPES)


@dataclasses.dataclass
class OptimizerConfig(Section, path="optimizer"):
    """The optax chain: clip, optimizer, weight decay, schedule."""

    name: str = option(
        "adamw",
        "optimizer; adam is adamw without weight decay, adafactor keeps a factored second moment, "
        "lion and sgd one moment, muon one moment of the layers' matrices (adam for the rest)",
        choices=("adamw", "adam", "adafactor", "lion", "muon", "sgd"),
    )
    placement: str = option(
        "device",
        "where state of the parameters' size lives: device, or host (pinned memory of the TPU's "
        "host, through which each update streams it a layer at a time; without TPUs it stays on "
        "the device)",
        choices=("device", "host"),
    )
    moments: str = option(
        "float32", "what moments are kept in; the update is computed in float32", choices=_DTYPES
    )
    rounding: str = option(
        "nearest",
        "how bfloat16 parameters take an update: nearest, stochastic (up or down, right in the "
        "mean), or master (a float32 copy in the state takes it)",
        choices=("nearest", "stochastic", "master"),
    )
    learning_rate: float = option(1e-3, "peak learning rate", at_least=0.0)
    schedule: str = option(
        "cosine",
        "learning rate after the warm-up: cosine, linear, constant, rsqrt (inverse square root), "
        "or wsd (constant, then a linear decay at the end)",
        choices=("cosine", "linear", "constant", "rsqrt", "wsd"),
    )
    warmup: Duration = option("5%", "duration of the linear warm-up from 0; 0 for none")
    decay: Duration = option("20%", "duration of the final decay of schedule=wsd")
    final_fraction: float = option(
        0.1, "learning rate at the end, as a fraction of the peak (cosine, linear, wsd)",
        at_least=0.0,
    )  # fmt: skip
    beta1: float = option(
        0.9, "decay rate of the first moment (momentum for sgd)", at_least=0.0, below=1.0
    )
    beta2: float = option(0.95, "decay rate of the second moment", at_least=0.0, below=1.0)
    epsilon: float = option(1e-8, "added to the root of the second moment", at_least=0.0)
    weight_decay: float = option(
        0.1, "decoupled weight decay, per unit of learning rate", at_least=0.0
    )
    no_decay: tuple[str, ...] = option(
        (".*/scale",), "path patterns of parameters without weight decay"
    )
    clip_norm: float = option(
        1.0, "largest global norm of the gradient; 0 for no clipping", at_least=0.0
    )
    average: float = option(
        0.0,
        "decay, a step, of a running average of the parameters, which evaluation then uses: 0.999; "
        "0 for none",
        at_least=0.0, below=1.0,
    )  # fmt: skip
    accumulate_steps: int = option(
        1,
        "steps between updates: only where even one microbatch a step is too "
        "much; it keeps a second gradient tree, train.microbatches does not",
        at_least=1,
    )


@dataclasses.dataclass
class TrainConfig(Section, path="train"):
    """The length of the run, and the loop."""

    steps: Duration | None = option(None, "length of the run (not with train.epochs)")
    epochs: int | None = option(None, "length of the run in epochs, as in Keras", at_least=1)
    steps_per_epoch: int | None = option(
        None, "steps called an epoch; None means one pass over the data", at_least=1
    )
    microbatches: int = option(
        1, "equal parts of the batch that are run one after the other, to save memory", at_least=1
    )
    max_steps_in_flight: int = option(
        4, "steps handed to the devices ahead of the last one known to be finished", at_least=1
    )
    log_every: Duration = option(10, "interval of logged metrics")
    evaluate_every: Duration = option("20%", "interval of evaluation; 0 for only at the end")
    evaluate_batches: int = option(
        0, "batches of an evaluation; 0 means the whole validation split", at_least=0
    )
    profile_at: Duration = option(0, "step at which a profile for TensorBoard starts; 0 for none")
    profile_steps: int = option(3, "steps in the profile", at_least=1)


@dataclasses.dataclass
class PlanConfig(Section, path="plan"):
    """What `run.py plan` reckons with. It changes nothing in a run."""

    price: float | None = option(
        None,
        "your dollars a chip-hour, 0 for a grant (plans are then ranked by time); None takes the "
        "list price",
        at_least=0.0,
    )
    price_kind: str = option(
        "on_demand",
        "which list price",
        choices=("on_demand", "spot", "committed_1y", "committed_3y"),
    )


@dataclasses.dataclass
class Config(Section):
    """A run: model, data, mesh, optimizer, loop."""

    name: str = option("", "name of the run; empty takes the config file's")
    workdir: str = option("", "folder of the results; empty means runs/<name>")
    seed: int = option(0, "seed of the initial parameters and of the order of examples", at_least=0)
    loss: str = option(
        "cross_entropy",
        "loss function",
        choices={
            "cross_entropy": "cross_entropy",
            "sparse_categorical_crossentropy": "cross_entropy",
        },
    )
    label_smoothing: float = option(
        0.0, "probability that the training loss spreads evenly", at_least=0.0, below=1.0
    )
    z_loss: float = option(
        0.0, "factor of the logits' squared log-sum-exp in the training loss: 1e-4", at_least=0.0
    )
    loss_chunk: int = option(
        0, "tokens of a device whose logits are held at a time; 0: 256 MiB of them", at_least=0
    )
    metrics: tuple[str, ...] = option(
        (), "metrics besides the loss, in training and evaluation", choices=("accuracy", "top_5")
    )
    compile_cache: str = option(
        "~/.cache/jaxtpu/compiled", "folder of compiled programs, so that the next start is quick; "
        "empty for none",
    )  # fmt: skip
    weights: str = option(
        "", "folder of a Hugging Face model to start from; it sets model.* and the tokenizer"
    )
    model: ModelConfig = subsection(ModelConfig)
    mesh: MeshConfig = subsection(MeshConfig)
    sharding: ShardingConfig = subsection(ShardingConfig)
    precision: PrecisionConfig = subsection(PrecisionConfig)
    data: DataConfig = subsection(DataConfig)
    images: ImagesConfig = subsection(ImagesConfig)
    optimizer: OptimizerConfig = subsection(OptimizerConfig)
    train: TrainConfig = subsection(TrainConfig)
    checkpoint: CheckpointConfig = subsection(CheckpointConfig)
    guard: GuardConfig = subsection(GuardConfig)
    watchdog: WatchdogConfig = subsection(WatchdogConfig)
    plan: PlanConfig = subsection(PlanConfig)
