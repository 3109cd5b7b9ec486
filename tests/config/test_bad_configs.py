"""Bad configurations: one line that names the field, its value and what works, exit code 2, nothing
started and nothing written. Where a value is suggested, it is tried."""

import dataclasses
import shlex

import pytest

from jaxtpu.config import load, split_arguments
from jaxtpu.setup import set_up
from tests.config import TINY

CONFIG = f"--config={TINY}"


@dataclasses.dataclass(frozen=True)
class Bad:
    """A bad command line.

    Attributes:
      name: of the test.
      words: what follows `--config=FILE`, fields without their `--config.`.
      value: the value that the message shows.
      hint: part of the message: what to write instead.
      mended: a value of the first field with which the run can be set up, or words in place of
        `words`; None where the hint is no single value.
      field: the field that the message names; the first one unless given.
    """

    name: str
    words: str
    value: object
    hint: str
    mended: str | None = None
    field: str = ""

    @property
    def named(self) -> str:
        return self.field or self.words.split("=")[0]

    @property
    def mended_words(self) -> str:
        one = "=" not in self.mended
        return f"{self.words.split('=')[0]}={shlex.quote(self.mended)}" if one else self.mended


# The tiny run: data=2 x fsdp=2 x tensor=2, embed 32, heads 4, batch 8, sequence 32, 20 steps.
TABLE = [
    # Names.
    Bad("unknown field", "model.colour=3", 3, "model has: name, vocab_size, "),
    Bad("unknown section", "tuning.level=3", 3, "The top level has: name, "),
    Bad("misspelled field", "model.layesr=3", 3, "'model.layers'?", "model.layers=3"),
    Bad("misspelled section", "modle.mlp=64", 64, "'model.mlp'?", "model.mlp=64"),
    Bad("another section's field", "model.steps=9", 9, "'train.steps'?", "train.steps=9"),
    Bad("no section", "embed=32", 32, "'model.embed' or 'sharding.embed'", "model.embed=32"),
    Bad("value for a section", "model=3", 3, "For example model.name."),
    Bad("field of a field", "model.embed.x=3", "3", "--config.model.embed=VALUE"),
    # Types and ranges.
    Bad("str for int", "model.layers=four", "four", "Example: 8.", "8"),
    Bad("float for int", "model.layers=1.5", 1.5, "Use 1 or 2.", "2"),
    Bad("bool for int", "model.heads=true", True, "Example: 8.", "8"),
    Bad("list for scalar", "model.heads=[4]", [4], "Example: 8.", "8"),
    Bad("none for int", "seed=None", None, "Example: 8.", "8"),
    Bad("too large for int", "seed=1e10", 1e10, "at most 2147483647", "2147483647"),
    Bad("str for float", "optimizer.beta1=big", "big", "0.1", "0.1"),
    Bad("infinite", "optimizer.beta2=1e999", float("inf"), "0.1", "0.1"),
    Bad("str for bool", "model.tied_embeddings=yes", "yes", "true", "true"),
    Bad("number for list", "metrics=3", "3", "accuracy", "accuracy"),
    Bad("below the range", "model.layers=0", 0, "Use 1.", "1"),
    Bad("above the range", "optimizer.beta2=1", 1.0, "Use 0.95.", "0.95"),
    Bad("experts", "model.moe.num_experts=4", 4, "Use 0.", "0"),
    # Choices.
    Bad("optimizer", "optimizer.name=adamm", "adamm", "'adam'?", "adam"),
    Bad("schedule", "optimizer.schedule=cosin", "cosin", "'cosine'?", "cosine"),
    Bad("loss", "loss=mse", "mse", "Choose from: cross_entropy, ", "cross_entropy"),
    Bad("metric", "metrics=acuracy", "acuracy", "'accuracy'?", "accuracy"),
    Bad("dtype", "precision.compute=bf16", "bf16", "'bfloat16'?", "bfloat16"),
    Bad("remat", "model.remat=ful", "ful", "'full'?", "full"),
    Bad("attention", "model.attention=atuo", "atuo", "'auto'?", "auto"),
    Bad("model", "model.name=tranformer", "tranformer", "'transformer'?", "transformer"),
    # Durations and the length of the run.
    Bad("unit", "train.log_every='5 stps'", "5 stps", "'5 steps'?", "5 steps"),
    Bad("unknown unit", "train.log_every='5 miles'", "5 miles", "Choose from: steps, "),
    Bad("scale", "train.steps=1m", "1m", "'1M'?", "1M"),
    Bad("percent of itself", "train.steps=5%", "5%", "Use 1000", "1000"),
    Bad("negative", "checkpoint.every=-5", -5, "Use 300", "300"),
    Bad("garbage", "train.evaluate_every=often", "often", "'5%'", "5%"),
    Bad("not finite", "optimizer.warmup='1e999 steps'", "1e999 steps", "'5%'", "5%"),
    Bad("no step", "train.steps=0", 0, "Use 1.", "1"),
    Bad("a unit left out", "train.steps=10B", "10B", "'10B tokens'", "10B tokens"),
    Bad("steps and epochs", "train.epochs=3", 3, "Set train.steps=None",
        "train.epochs=3 train.steps=None"),
    Bad("no length", "train.steps=None", None, "train.epochs=1", "train.steps=None train.epochs=1"),
    Bad("warm-up longer than the run", "optimizer.warmup=30", 30, "at most 19", "19"),
    Bad("no update", "optimizer.accumulate_steps=21", 21, "at most 20", "20"),
    Bad("accumulation on the host", "optimizer.placement=host optimizer.accumulate_steps=2", "host",
        "train.microbatches", "optimizer.placement=device optimizer.accumulate_steps=2",
        field="optimizer.placement"),
    Bad("nothing to round", "optimizer.rounding=stochastic", "stochastic", "Use nearest",
        "nearest"),
    Bad("profile after the run", "train.profile_at=20", 20, "at most 19", "19"),
    # The model.
    Bad("heads do not divide embed", "model.embed=36", 36, "Use 32 or 40", "40"),
    Bad("odd features a head", "model.embed=12", 12, "Use 8 or 16", "16"),
    Bad("odd head_dim", "model.head_dim=5", 5, "Use 4 or 6.", "6"),
    Bad("kv_heads do not divide heads", "model.kv_heads=3", 3, "Use 2.", "2"),
    Bad("more kv_heads than heads", "model.kv_heads=9", 9, "Use 4.", "4"),
    Bad("vocabulary too small", "model.vocab_size=100", 100, "Use 257", "257"),
    # The mesh and the batch.
    Bad("product does not divide", "mesh.data=3", 3, "Use mesh.data=2.", "2"),
    Bad("product is wrong", "mesh.data=8 mesh.fsdp=2", 8, "Use mesh.data=2.",
        "mesh.data=2 mesh.fsdp=2"),
    Bad("two axes fill up", "mesh.data=-1", -1, "Use 1.", "mesh.data=-1 mesh.fsdp=1",
        field="mesh.fsdp"),
    Bad("zero axis", "mesh.tensor=0", 0, "Use 1, or -1", "1"),
    Bad("batch not divisible", "data.batch_size=6", 6, "Use 4 or 8.", "4"),
    Bad("batch smaller than the mesh", "data.batch_size=1", 1, "Use 4.", "4"),
    Bad("microbatches", "train.microbatches=3", 8, "Use 12.",
        "train.microbatches=3 data.batch_size=12", field="data.batch_size"),
    Bad("sequence not divisible", "mesh.data=1 mesh.context=2 data.sequence_length=33", 33,
        "Use 32 or 34.", "mesh.data=1 mesh.context=2 data.sequence_length=34",
        field="data.sequence_length"),
    # The rule table.
    Bad("misspelled axis", "sharding.embed=fdsp", "fdsp", "'fsdp'?", "fsdp"),
    Bad("axes without a comma", "sharding.embed='fsdp data'", "fsdp data", "Use 'fsdp,data'",
        "fsdp,data"),
    Bad("axis twice", "sharding.mlp=tensor,tensor", "tensor,tensor", "Use 'tensor'", "tensor"),
    Bad("parameters replicated", "sharding.embed=", 2, "sharding.embed=fsdp", "fsdp",
        field="mesh.fsdp"),
    Bad("expert axis without experts", "mesh.data=1 mesh.expert=2", 2, "mesh.expert=1",
        "mesh.data=1 mesh.expert=1", field="mesh.expert"),
    Bad("pattern without a match", "optimizer.no_decay=.*/bias", ".*/bias", "scale", ".*/scale"),
    Bad("pattern that is none", "optimizer.no_decay='*/scale'", "*/scale", "'.*/scale'",
        ".*/scale"),
    # Data.
    Bad("source", "data.source=python_corups", "python_corups", "'python_corpus'?",
        "python_corpus"),
    Bad("kind of source", "data.source=csv:x", "csv:x", "Use python_corpus", "python_corpus"),
    Bad("tokenizer", "data.tokenizer=byte", "byte", "'bytes'?", "bytes"),
    Bad("training split", "data.train_split=trian", "trian", "'train'?", "train"),
    Bad("validation split", "data.validation_split=valid", "valid", "'validation'?", "validation"),
    Bad("text field", "data.text_field=txt", "txt", "'text'?", "text"),
    Bad("evaluation of nothing", "data.validation_split= train.evaluate_batches=2", 2,
        "train.evaluate_batches=0", "data.validation_split= train.evaluate_batches=0",
        field="train.evaluate_batches"),
    Bad("sequence longer than the data", "data.sequence_length=1e9", 10**9, "Use less."),
]  # fmt: skip


def words_of(text: str) -> list[str]:
    """`a.b='x y' c=1` as words of a command line."""
    return [f"--config.{word}" for word in shlex.split(text)]


@pytest.fixture(scope="module", autouse=True)
def prepared_corpus():
    """The first use of the corpus prepares it, and says so: not within a test of what is said."""
    set_up(load(TINY))


@pytest.mark.parametrize("bad", TABLE, ids=lambda bad: bad.name.replace(" ", "-"))
def test_a_bad_field_is_refused_and_the_suggestion_works(bad, refused, tmp_path):
    said = refused(
        CONFIG, f"--workdir={tmp_path}/run", "--config.compile_cache=", *words_of(bad.words)
    )
    named = f"{bad.named}={bad.value!r}: "
    assert said.startswith(named)
    assert bad.hint in said.removeprefix(named)
    if bad.mended is not None:
        spec, overrides, _ = split_arguments([CONFIG, *words_of(bad.mended_words)])
        set_up(load(spec, overrides))
