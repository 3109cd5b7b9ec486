"""`run.py import`, training and generating from what it made, `run.py export`."""

import json
import tracemalloc

import jax
import numpy as np
import pytest

from jaxtpu.cli import main
from jaxtpu.errors import ConfigError
from jaxtpu.interop.folder import HuggingFaceFolder
from jaxtpu.interop.read import read_params
from tests.interop.models import CASES, reference, save, torch, transformers
from tests.interop.test_architectures import ours

TRAINING = [
    "--config.data.sequence_length=16", "--config.train.steps=2", "--config.precision.compute=float32",
    "--config.compile_cache=", "--config.sharding.max_replicated=1", "--config.data.batch_size=8",
    "--config.train.evaluate_batches=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder with weights, config and a byte-level tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = save(reference("llama3"), tmp_path_factory.mktemp("llama"))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {"<|endoftext|>": 0} | {letter: i + 1 for i, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(words, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    return folder


@pytest.fixture(scope="module")
def run(llama, tmp_path_factory):
    """A run imported from that folder."""
    workdir = tmp_path_factory.mktemp("runs") / "llama"
    assert main(["import", f"--from={llama}", f"--workdir={workdir}", *TRAINING]) == 0
    return workdir


def test_an_imported_run_says_what_it_is(run):
    config = json.loads((run / "config.json").read_text())
    assert config["model"]["kv_heads"] == 3 and config["model"]["text"]["rope_type"] == "llama3"
    assert config["data"]["tokenizer"] == f"hf:{run}/tokenizer"


def test_exported_again_it_is_what_it_was(run, llama, tmp_path):
    assert main(["export", f"--workdir={run}", f"--to={tmp_path}"]) == 0
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, value in reference("llama3").state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (llama / name).read_bytes()
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).decode([0]) == "<|endoftext|>"


def test_exported_in_bfloat16_it_is_rounded_once(run, tmp_path):
    assert main(["export", f"--workdir={run}", f"--to={tmp_path}", "--dtype=bfloat16"]) == 0
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, value in reference("llama3").state_dict().items():
        assert torch.equal(value.bfloat16(), again.state_dict()[name]), name


def test_it_trains_and_generates(run, capsys):
    assert main([f"--config={run}/config.json", f"--workdir={run}"]) == 0
    assert "2 steps" in capsys.readouterr().out
    assert main(["generate", f"--workdir={run}", "--prompt=def ", "--tokens=4"]) == 0
    assert capsys.readouterr().out.startswith("def ")


def test_a_config_can_name_the_weights(llama, tmp_path, capsys):
    arguments = ["--config=tests/configs/tiny.py", f"--workdir={tmp_path}/run", *TRAINING]
    plain = Tiny.fields(llama)
    assert main([*arguments, f"--config.weights={llama}", *plain]) == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["model"]["vocab_size"] == 261 and config["data"]["tokenizer"] == f"hf:{llama}"
    capsys.readouterr()
    wrong = [*arguments, f"--config.weights={llama}", *plain, "--config.model.heads=12"]
    assert main(wrong) == 2
    assert "model.heads=12: the model in" in capsys.readouterr().err


class Tiny:
    """The tiny config sets fields of its model; these say what the folder has."""

    @staticmethod
    def fields(folder) -> list[str]:
        names = ("embed", "layers", "heads", "kv_heads", "head_dim", "mlp", "norm_epsilon")
        fields = HuggingFaceFolder(str(folder)).model_fields()
        return [f"--config.model.{name}={fields[name]}" for name in names]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "Supported: LlamaForCausalLM, MistralForCausalLM",
        ),
        ({"hidden_act": "relu"}, "hidden_act='relu'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "default, linear, llama3"),
    ],
)
def test_what_is_not_supported_is_named(llama, tmp_path, capsys, change, words):
    hf = json.loads((llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(hf | change))
    assert main(["import", f"--from={tmp_path}", f"--workdir={tmp_path}/run", *TRAINING]) == 2
    assert words in capsys.readouterr().err


def test_pickled_weights_are_not_read(llama, tmp_path):
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ConfigError, match="pickled ones are not read"):
        HuggingFaceFolder(str(tmp_path)).files()


@pytest.mark.parametrize("cut", [4, 100, -100])
def test_a_file_that_is_cut_short_is_an_error(llama, tmp_path, cut):
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    whole = (llama / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:cut])
    with pytest.raises(ConfigError, match="no whole safetensors file"):
        HuggingFaceFolder(str(tmp_path)).files()


def test_no_second_copy_is_held_while_weights_are_read(tmp_path):
    """In several files; on the host there is never more than 1.3 of the largest file's bytes."""
    folder = save(reference("gpt2"), tmp_path, max_shard_size="2MB")
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 1
    config, programs, params = ours(folder, CASES["gpt2"][1]["vocab_size"])
    shardings = jax.tree.map(lambda p: p.sharding, params)
    opened = HuggingFaceFolder(str(folder))
    tracemalloc.start()
    again = read_params(opened, config, programs.model, shardings)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # On the CPU a device's array can be the very memory that NumPy made: all of that counts here.
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(again))
    assert peak - held < 1.3 * max(path.stat().st_size for path in files)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
