"""Vision models against transformers and PyTorch, and on meshes against one device."""

import jax
import numpy as np
import pytest

from jaxtpu.models import make_model
from jaxtpu.precision import make_precision
from tests.tiny import put, run_steps
from tests.tiny_images import CLASSES, SIZE, image_batch, image_config, image_programs

DESCENT = {
    "name": "sgd", "beta1": 0.0, "learning_rate": 1.0, "schedule": "constant", "warmup": 0,
    "weight_decay": 0.0, "clip_norm": 0.0, "no_decay": (),
}  # fmt: skip
MESHES = [{"data": 8}, {"data": 2, "fsdp": 4}, {"fsdp": 2, "tensor": 2, "data": 2}]


def model_of(name: str, **vision):
    config = image_config(name)
    config.model.vision.update(vision)
    config.model.head_dim = config.model.embed // config.model.heads
    model = make_model(config.model, make_precision(config.precision), 1)
    return config, model


def run(model, params, state, images, *, training: bool):
    """(logits, state) of `Model.apply_to`, compiled."""
    call = jax.jit(lambda p, s, x: model.apply_to(p, s, x, training=training))
    return call(params, state, images)


def randomised(tree, seed: int = 0, low: float = -0.2, high: float = 0.2):
    """Nothing is left at its initial 0 or 1, where a fault would not show."""
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: (np.asarray(x) * 0.5 + random.uniform(low, high, x.shape)).astype(np.float32),
        tree,
    )


def torch_tensor(array):
    torch = pytest.importorskip("torch")
    return torch.from_numpy(np.ascontiguousarray(array))


def assign(target, array) -> None:
    assert tuple(target.shape) == tuple(array.shape), (target.shape, array.shape)
    target.data.copy_(torch_tensor(array))


def copy_vit(params, reference) -> None:
    embeddings = reference.vit.embeddings
    E = params["head"]["kernel"].shape[0]
    patch = params["patches"]["project"]
    P = round((patch["kernel"].shape[0] / 3) ** 0.5)
    conv = patch["kernel"].reshape(P, P, 3, E).transpose(3, 2, 0, 1)
    assign(embeddings.patch_embeddings.projection.weight, conv)
    assign(embeddings.patch_embeddings.projection.bias, patch["bias"])
    assign(embeddings.cls_token, params["tokens"][None])
    assign(embeddings.position_embeddings, params["positions"][None])
    layers = params["encoder"]["layers"]
    state = reference.vit.state_dict()
    # Names differ between versions of transformers: the first that is there is taken.
    names = {
        "attention/query": ("attention.attention.query", "attention.q_proj"),
        "attention/key": ("attention.attention.key", "attention.k_proj"),
        "attention/value": ("attention.attention.value", "attention.v_proj"),
        "attention/out": ("attention.output.dense", "attention.o_proj"),
        "mlp/up": ("intermediate.dense", "mlp.fc1"),
        "mlp/down": ("output.dense", "mlp.fc2"),
        "attention_norm": ("layernorm_before",),
        "mlp_norm": ("layernorm_after",),
    }
    prefix = "encoder.layer" if any(k.startswith("encoder.layer.") for k in state) else "layers"
    for i in range(len(layers["mlp_norm"]["scale"])):
        for ours, theirs in names.items():
            part = layers
            for word in ours.split("/"):
                part = part[word]
            name = next(n for n in theirs if f"{prefix}.{i}.{n}.weight" in state)
            weight, bias = (state[f"{prefix}.{i}.{name}.{kind}"] for kind in ("weight", "bias"))
            if "scale" in part:
                assign(weight, part["scale"][i])
            else:
                assign(weight, part["kernel"][i].reshape(tuple(weight.shape)[::-1]).T)
            assign(bias, part["bias"][i].reshape(-1))
    assign(reference.vit.layernorm.weight, params["final_norm"]["scale"])
    assign(reference.vit.layernorm.bias, params["final_norm"]["bias"])
    assign(reference.classifier.weight, params["head"]["kernel"].T)
    assign(reference.classifier.bias, params["head"]["bias"])


def test_vit_gives_the_logits_of_transformers():
    transformers = pytest.importorskip("transformers")
    config, model = model_of("vit")
    shape, vision = config.model, config.model.vision
    reference = transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=shape.embed, num_hidden_layers=shape.layers, image_size=SIZE,
            num_attention_heads=shape.heads, intermediate_size=shape.mlp,
            patch_size=vision.patch, num_labels=CLASSES, layer_norm_eps=shape.norm_epsilon,
        )
    ).eval()  # fmt: skip
    params = randomised(model.init(jax.random.key(0)))
    copy_vit(params, reference)
    images = image_batch()["images"]
    ours, _ = run(model, params, None, images, training=False)
    theirs = reference(torch_tensor(images.transpose(0, 3, 1, 2))).logits.detach().numpy()
    assert np.abs(theirs).max() > 0.3
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def copy_resnet(params, state, reference) -> None:
    def convolution(layer, conv, norm, norm_state):
        assign(layer.convolution.weight, conv["kernel"].transpose(3, 2, 0, 1))
        assign(layer.normalization.weight, norm["scale"])
        assign(layer.normalization.bias, norm["bias"])
        assign(layer.normalization.running_mean, norm_state["mean"])
        assign(layer.normalization.running_var, norm_state["variance"])

    resnet = reference.resnet
    convolution(resnet.embedder.embedder, params["stem"], params["stem_norm"], state["stem_norm"])
    blocks = [block for stage in resnet.encoder.stages for block in stage.layers]
    for i, block in enumerate(blocks):
        ours, kept = params["blocks"][i], state["blocks"][i]
        names = (("reduce", "reduce_norm"), ("conv", "norm"), ("expand", "expand_norm"))
        for layer, (conv, norm) in zip(block.layer, names, strict=True):
            convolution(layer, ours[conv], ours[norm], kept[norm])
        if "shortcut" in ours:
            norm = "shortcut_norm"
            convolution(block.shortcut, ours["shortcut"], ours[norm], kept[norm])
    assign(reference.classifier[1].weight, params["head"]["kernel"].T)
    assign(reference.classifier[1].bias, params["head"]["bias"])


@pytest.mark.parametrize("training", [False, True])
def test_resnet_gives_the_logits_and_the_running_averages_of_transformers(training):
    transformers = pytest.importorskip("transformers")
    config, model = model_of("resnet", stages=(2, 2), width=8, norm="batch", stem="imagenet")
    config.model.norm_epsilon = 1e-5
    model = make_model(config.model, make_precision(config.precision), 1)
    reference = transformers.ResNetForImageClassification(
        transformers.ResNetConfig(
            embedding_size=8, hidden_sizes=[32, 64], depths=[2, 2], layer_type="bottleneck",
            num_labels=CLASSES, downsample_in_bottleneck=False,
        )
    ).train(training)  # fmt: skip
    params = randomised(model.init(jax.random.key(0)))
    state = randomised(model.init_state(), 1, 0.0, 0.5)
    copy_resnet(params, state, reference)
    images = image_batch()["images"]
    ours, after = run(model, params, state, images, training=training)
    theirs = reference(torch_tensor(images.transpose(0, 3, 1, 2))).logits.detach().numpy()
    assert np.abs(theirs).max() > 0.1
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    last = reference.resnet.encoder.stages[-1].layers[-1].layer[-1].normalization
    for name, buffer in (("mean", last.running_mean), ("variance", last.running_var)):
        kept = after["blocks"][3]["expand_norm"][name]
        np.testing.assert_allclose(kept, buffer.numpy(), atol=1e-5)


def test_mixer_gives_the_logits_of_a_mixer_in_pytorch():
    torch = pytest.importorskip("torch")
    config, model = model_of("mixer", token_mlp=24)
    params = randomised(model.init(jax.random.key(0)))
    t = jax.tree.map(torch_tensor, params)
    functional = torch.nn.functional

    def norm(x, p):
        return functional.layer_norm(x, x.shape[-1:], p["scale"], p["bias"], 1e-6)

    def mlp(x, p, i):
        up = functional.gelu(x @ p["up"]["kernel"][i] + p["up"]["bias"][i])
        return up @ p["down"]["kernel"][i] + p["down"]["bias"][i]

    images = image_batch()["images"]
    kernel = t["patches"]["project"]["kernel"].reshape(4, 4, 3, -1).permute(3, 2, 0, 1)
    pixels = torch_tensor(images.transpose(0, 3, 1, 2))
    x = functional.conv2d(pixels, kernel, t["patches"]["project"]["bias"], stride=4)
    x = x.flatten(2).transpose(1, 2)
    layers = t["mixer"]["layers"]
    for i in range(config.model.layers):
        of_layer = lambda name, i=i: {k: v[i] for k, v in layers[name].items()}  # noqa: E731
        y = norm(x, of_layer("token_norm")).transpose(1, 2)
        x = x + mlp(y, layers["token_mlp"], i).transpose(1, 2)
        x = x + mlp(norm(x, of_layer("mlp_norm")), layers["mlp"], i)
    theirs = norm(x, t["final_norm"]).mean(1) @ t["head"]["kernel"] + t["head"]["bias"]
    ours, _ = run(model, params, None, images, training=False)
    np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-4)


@pytest.mark.parametrize("vision", [{"pool": "mean", "registers": 3}, {"positions": "sincos"},
                                    {"pool": "cls", "registers": 1}])  # fmt: skip
def test_options_of_vit_change_what_they_say(vision):
    config, model = model_of("vit", **vision)
    params = randomised(model.init(jax.random.key(0)))
    images = image_batch()["images"]
    logits, _ = run(model, params, None, images, training=False)
    assert logits.shape == (16, CLASSES)
    tokens = vision.get("registers", 0) + (config.model.vision.pool == "cls")
    assert params["tokens"].shape[0] == tokens
    assert ("positions" in params) == ("positions" not in vision)
    # Patches have a place: moved about, they are another image.
    moved, _ = run(model, params, None, images[:, ::-1], training=False)
    assert np.abs(np.asarray(logits - moved)).max() > 1e-3
    altered = dict(params) | {"tokens": -params["tokens"]}
    other, _ = run(model, altered, None, images, training=False)
    assert np.abs(np.asarray(logits - other)).max() > 1e-3


def gradient(programs, batch):
    before = jax.device_get(programs.init().params)
    state, history = run_steps(programs, [batch])
    moved = jax.tree.map(lambda a, b: a - np.asarray(b), before, state.params)
    return moved, history[0], jax.device_get(state.model_state)


@pytest.mark.parametrize("name", ["vit", "mixer", "mlp", "resnet"])
def test_a_mesh_gives_the_gradient_and_statistics_of_one_device(name):
    # Norms and biases are a large part of so small a model, and are not divided.
    options = {"optimizer": DESCENT, "sharding": {"max_replicated": 0.2}}
    one = gradient(image_programs(name, {}, devices=1, **options), image_batch())
    meshes = MESHES if name == "resnet" else MESHES[2:]
    for sizes in meshes:
        other = gradient(image_programs(name, sizes, **options), image_batch())
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4)
    assert one[1]["examples"] == 13
    if name == "resnet":
        assert np.abs(one[2]["stem_norm"]["mean"]).max() > 1e-3


def test_padding_changes_no_statistic():
    programs = image_programs("resnet", {}, devices=1)
    batch = image_batch(padding=3)
    other = dict(batch) | {"images": batch["images"].copy()}
    other["images"][-3:] = 100.0
    states = [run_steps(programs, [b])[0] for b in (batch, other)]
    kept = [jax.tree.leaves(state.model_state) for state in states]
    for a, b in zip(*kept, strict=True):
        np.testing.assert_array_equal(a, b)


def test_smoothing_of_mixed_labels_is_that_of_pytorch():
    torch = pytest.importorskip("torch")
    from jaxtpu.kernels.cross_entropy import cross_entropy

    random = np.random.default_rng(0)
    logits = random.normal(size=(5, 7)).astype(np.float32)
    shares = random.dirichlet(np.ones(7), 5).astype(np.float32)
    theirs = torch.nn.functional.cross_entropy(
        torch.from_numpy(logits), torch.from_numpy(shares), reduction="none", label_smoothing=0.1
    )
    ours = cross_entropy(logits, shares, label_smoothing=0.1)
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-5)


def test_the_average_of_weights_is_what_evaluation_uses():
    optimizer = DESCENT | {"average": 0.5, "learning_rate": 0.1}
    programs = image_programs("mlp", {"data": 2, "fsdp": 4}, optimizer=optimizer)
    state, params, average = programs.init(), [], None
    for step in range(3):
        params.append(jax.device_get(state.params))
        average = params[-1] if average is None else average
        state, _ = programs.train_step(state, put(programs, image_batch(step)))
        decay = min(0.5, (1 + step) / (10 + step))
        new = jax.device_get(state.params)
        average = jax.tree.map(lambda a, p, d=decay: d * a + (1 - d) * p, average, new)
    for a, b in zip(jax.tree.leaves(average), jax.tree.leaves(state.average), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    batch = put(programs, image_batch())
    used = programs.eval_step(state.evaluated(), batch)["loss"]
    assert float(used) == float(programs.eval_step(state.average, batch)["loss"])
    assert float(used) != float(programs.eval_step(state.params, batch)["loss"])


def test_without_options_the_state_holds_nothing_more():
    state = image_programs("mlp", {}, devices=1).abstract_state
    assert state.model_state is None and state.average is None
    assert state.evaluated() is state.params
