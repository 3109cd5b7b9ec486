"""The section `data`: where examples come from and what is done with them."""

import dataclasses

from jaxtpu.config.section import Section, option


@dataclasses.dataclass
class DataConfig(Section, path="data"):
    """Where examples come from."""

    source: str = option(
        "python_corpus",
        "python_corpus (the standard library of this Python); tfds:NAME with a text feature; "
        "files:GLOB of .txt (a document each), .jsonl and .parquet (a document a record), also .gz "
        "and .zst; hf:FOLDER of a saved Hugging Face data set; tokens:FILE.npy, tokenised already",
    )
    mixture: tuple[str, ...] = option(
        (),
        "several sources, each as 'WEIGHT SOURCE', or 'WEIGHT->WEIGHT SOURCE' for a share that moves "
        "evenly over the run; takes the place of data.source",
    )
    train_split: str = option(
        "train", "split to train on; of files: train, validation, or all of them"
    )
    validation_split: str = option("validation", "split to evaluate on; empty for none")
    validation_percent: float = option(
        1.0, "of the documents of files:, chosen by a hash of their text: the split validation",
        at_least=0.0, below=100.0,
    )  # fmt: skip
    text_field: str = option("text", "name of the feature that holds the text")
    answer_field: str = option(
        "",
        "name of a feature with the answer to the text; the loss is then on answers alone",
    )
    tokenizer: str = option(
        "bytes",
        "bytes (256 byte values and a document separator); hf:FOLDER with a tokenizer.json; "
        "sentencepiece:FILE.model; ids:VOCABULARY:SEPARATOR for tokens: whose tokenizer is not here",
    )
    separator: str = option(
        "", "the special token of an hf: tokenizer that leads a document; empty takes the usual one"
    )
    packing: str = option(
        "concatenate",
        "how documents become sequences: concatenate (one stream, cut into equal parts) or pack "
        "(whole documents where they fit, padding at the end of a sequence)",
        choices=("concatenate", "pack"),
    )
    max_bad: float = option(
        0.0,
        "the fraction of records that may be unreadable: they are left out and counted; more is an "
        "error, which names the first",
        at_least=0.0,
    )
    batch_size: int = option(
        16, "sequences a step, over all devices (the global batch)", at_least=1
    )
    sequence_length: int = option(256, "tokens a sequence", at_least=1)
    prefetch: int = option(2, "batches kept ready on the devices ahead of the step", at_least=1)
    cache_gib: float = option(
        2.0, "host memory that token files may take while they are read, GiB a process",
        at_least=0.001,
    )  # fmt: skip
    directory: str = option(
        "~/.cache/jaxtpu/data", "prepared data sets and token files, shared between runs"
    )
