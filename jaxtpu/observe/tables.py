"""The start-up table and the closing table: every number derived, and shown."""

import math
from typing import Any

import jax

from jaxtpu.config import Config, RunUnits
from jaxtpu.data.streams import words_about
from jaxtpu.hardware import generation_of
from jaxtpu.kernels.attention import choose_attention
from jaxtpu.kernels.placement import sequence_parts
from jaxtpu.kernels.scores import scores_of
from jaxtpu.mesh import has_host_memory
from jaxtpu.models.sizes import padded_mlp, padded_vocabulary
from jaxtpu.observe.console import count, size
from jaxtpu.observe.image_tables import image_model, image_rows, saved_rows
from jaxtpu.observe.memory import tree_bytes_per_device
from jaxtpu.train.programs import Programs

Rows = list[tuple[str, str]]


def peak_flops(mesh: jax.sharding.Mesh) -> float | None:
    """Peak bfloat16 FLOP/s of all devices of the mesh; None where it is not known."""
    generation = generation_of(mesh.devices.flat[0].device_kind)
    return generation.peak_flops_bf16 * mesh.size if generation else None


def startup_rows(
    config: Config,
    programs: Programs,
    units: RunUnits,
    stream: Any,
    start: int,
    base: Config | None = None,
) -> Rows:
    """What is about to run.

    Args:
      start: steps done already.
      base: what the config file says by itself, where the command line changes the model.
    """
    reads_images = programs.model.task == "classification"
    params = programs.abstract_state.params
    return [
        ("run", f"{config.name}, in {config.workdir}"),
        ("devices", _devices(programs.mesh)),
        ("mesh", " x ".join(f"{axis}={n}" for axis, n in programs.mesh.shape.items())),
        ("model", image_model(config.model) if reads_images else _text_model(config)),
        ("parameters", _parameters(params)),
        *saved_rows(config, base, programs),
        (
            "optimizer",
            f"{config.optimizer.name}, {config.optimizer.schedule} from "
            f"{config.optimizer.learning_rate:g}; state "
            f"{size(tree_bytes_per_device(programs.abstract_state.opt_state))} a device",
        ),
        *_placement(config, programs),
        (
            "precision",
            f"{config.precision.params} parameters, {config.precision.compute} compute; "
            f"softmax, norms and loss float32",
        ),
        ("rematerialisation", _rematerialisation(config, programs)),
        *(image_rows(config, stream) if reads_images else _text_rows(config, programs, stream)),
        (
            "length",
            f"{units.steps:,} steps, {count(units.steps * units.tokens_per_step)} "
            f"{'images' if reads_images else 'tokens'}, "
            f"{units.steps / units.steps_per_epoch:.2f} epochs of {units.steps_per_epoch:,} steps"
            + (f"; {start:,} steps done" if start else ""),
        ),
        ("FLOPs", _flops(programs, units)),
        *[("not divided", str(note)) for note in programs.undivided],
    ]


def _text_model(config: Config) -> str:
    model = config.model
    return (
        f"{model.name}: {model.layers} layers, embed {model.embed}, {model.heads} heads "
        f"({model.kv_heads} key/value) of {model.head_dim}, "
        f"mlp {model.mlp}{_padding(model.mlp, padded_mlp(model))}, "
        f"vocabulary {model.vocab_size}{_padding(model.vocab_size, padded_vocabulary(model))}"
    )


def _text_rows(config: Config, programs: Programs, stream: Any) -> Rows:
    source = "a mixture" if config.data.mixture else config.data.source
    return [
        ("attention", "{}: {}".format(*_attention(config, programs))),
        ("batch", _batch(config, programs)),
        ("data", f"{source}: {stream.num_documents:,} documents, {stream.num_tokens:,} tokens"),
        *[("", line) for line in words_about(stream, config.data.sequence_length)],
    ]


def _placement(config: Config, programs: Programs) -> Rows:
    """Where the optimizer's state is, if the host was asked for."""
    if config.optimizer.placement == "device":
        return []
    leaves = jax.tree.leaves(programs.abstract_state.opt_state)
    there = [leaf for leaf in leaves if leaf.sharding.memory_kind == "pinned_host"]
    if there:
        amount = size(tree_bytes_per_device(there))
        return [("optimizer state", f"{amount} a device on the host, streamed a layer at a time")]
    if has_host_memory(programs.mesh):
        return [("optimizer state", f"{config.optimizer.name} has none that is worth moving")]
    told = "stays on the devices: optimizer.placement=host needs TPUs; updated a layer at a time"
    return [("optimizer state", told)]


def _devices(mesh: jax.sharding.Mesh) -> str:
    device = mesh.devices.flat[0]
    kind = "emulated on the CPU" if device.platform == "cpu" else device.device_kind
    return f"{mesh.size} ({kind}), {jax.process_count()} process(es)"


def _padding(size: int, padded: int) -> str:
    return f" (padded to {padded})" if padded != size else ""


def _rematerialisation(config: Config, programs: Programs) -> str:
    model = config.model
    groups = [f"groups of {model.remat_group} layers"] if model.remat_group > 1 else []
    words = ", ".join((model.remat, *model.remat_tensors, *groups))
    platform = programs.mesh.devices.flat[0].platform
    if "offload" in words and platform != "tpu":
        words += f"; {platform} has no host memory apart: what is to be offloaded is kept"
    return words


def _parameters(params: Any) -> str:
    by_dtype: dict[str, int] = {}
    for leaf in jax.tree.leaves(params):
        by_dtype[leaf.dtype.name] = by_dtype.get(leaf.dtype.name, 0) + leaf.size
    total = sum(by_dtype.values())
    kinds = ", ".join(f"{number:,} {name}" for name, number in by_dtype.items())
    return f"{count(total)} ({kinds}); {size(tree_bytes_per_device(params))} a device"


def _attention(config: Config, programs: Programs) -> tuple[str, str]:
    device = programs.mesh.devices.flat[0]
    parts = sequence_parts(programs.rules)
    length, special = config.data.sequence_length, scores_of(config.model).special
    return choose_attention(config.model.attention, device.device_kind, length, parts, special)


def _batch(config: Config, programs: Programs) -> str:
    rows = programs.batch_sharding.shard_shape(programs.abstract_batch["inputs"].shape)[0]
    micro = config.train.microbatches
    return (
        f"{config.data.batch_size} x {config.data.sequence_length} tokens = "
        f"{config.data.batch_size * config.data.sequence_length:,} a step; {rows} sequences a "
        f"device in {micro} microbatch{'es' if micro > 1 else ''} of {rows // micro}"
    )


def _flops(programs: Programs, units: RunUnits) -> str:
    per_token = programs.model.flops_per_token
    peak = peak_flops(programs.mesh)
    known = f"peak {peak / 1e12:.4g} TFLOP/s in all" if peak else "no peak known here, so no MFU"
    if programs.model.task == "classification":
        made = f"{count(per_token)} an image (6 a weight and each place where it is used)"
    else:
        made = f"{count(per_token)} a token (6 per weight, 12 L H D T for attention)"
    return f"{made}, {count(per_token * units.tokens_per_step)} a step; {known}"


def closing_rows(
    result: dict[str, float],
    entropies: tuple[float, float] | None,
    tokens_per_byte: float,
    memory: tuple[int, str],
    places: Rows,
) -> Rows:
    """What came of it.

    Args:
      result: the last training metrics, and `validation/...`.
      entropies: unigram and bigram entropy of the validation text, bits per byte.
      tokens_per_byte: of the validation text.
      memory: bytes, and where that number is from.
      places: where things are, and commands.
    """
    rows = [("training", _loss(result, "train", result.get("train/bits_per_byte")))]
    if "validation/loss" in result:
        bits = result["validation/loss"] / math.log(2) * tokens_per_byte
        rows.append(("validation", _loss(result, "validation", bits)))
    if entropies:
        unigram, bigram = entropies
        rows.append(
            (
                "look-up tables",
                f"{unigram:.3f} bits/byte (unigram), {bigram:.3f} bits/byte (bigram)",
            )
        )
    units = (("tokens", "tokens"), ("examples", "images"))
    for unit, word in (u for u in units if f"speed/{u[0]}_per_second" in result):
        mfu = f", MFU {result['speed/mfu']:.1%}" if "speed/mfu" in result else ""
        rows.append(
            (
                "speed",
                f"{result[f'speed/{unit}_per_second']:,.0f} {word}/s, "
                f"{result['speed/step_seconds']:.3f} s a step{mfu}; waiting for input "
                f"{result['speed/input_wait_fraction']:.1%} of the time",
            )
        )
    rows.append(("memory", f"{size(memory[0])} a device ({memory[1]})"))
    return rows + places


def _loss(result: dict[str, float], kind: str, bits: float | None) -> str:
    text = f"loss {result[f'{kind}/loss']:.4f}"
    if bits is not None and math.isfinite(bits):
        text += f", {bits:.3f} bits/byte"
    if f"{kind}/accuracy" in result:
        text += f", accuracy {result[f'{kind}/accuracy']:.3f}"
    return text
