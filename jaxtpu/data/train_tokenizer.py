"""`run.py tokenizer`: a byte-level BPE tokenizer (arXiv:1508.07909), trained on a split."""

import pathlib
from collections.abc import Iterator

import tokenizers
from rich.console import Console

from jaxtpu.config import Config
from jaxtpu.data.mixture import parse_mixture
from jaxtpu.data.records import Answer, BadRecord, Record
from jaxtpu.data.sources import open_source
from jaxtpu.errors import EXIT_OK, ConfigError, UserError

SEPARATOR = "<|endoftext|>"
_LEAST = 257  # the bytes, and the separator
_SAMPLE_BYTES = 1 << 20  # of validation text, to say how short the tokens make it


def train_tokenizer(
    config: Config, vocab_size: int, folder: str, console: Console, hidden: bool
) -> int:
    """Trains on the documents of `data.train_split`, and writes `folder`/tokenizer.json.

    Args:
      vocab_size: ids, with the 256 bytes and the separator.
      hidden: shows no progress bar.

    Raises:
      ConfigError: the vocabulary is too small, or the data cannot be read.
      UserError: a record cannot be read.
    """
    if vocab_size < _LEAST:
        raise ConfigError(
            "--vocab_size", vocab_size, f"is less than 256 bytes and {SEPARATOR}.", "Use 8192."
        )
    if config.data.separator not in ("", SEPARATOR):
        raise ConfigError(
            "data.separator", config.data.separator, "is not what is written.", f"Use {SEPARATOR}."
        )
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATOR],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=not hidden,
    )
    made.train_from_iterator(_texts(config, "train_split"), trainer)
    path = pathlib.Path(folder).expanduser() / "tokenizer.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    made.save(str(path))
    size = made.get_vocab_size(with_added_tokens=True)
    if size < vocab_size:
        console.print(f"The text has no more than {size:,} tokens that occur twice.")
    split = "validation_split" if config.data.validation_split else "train_split"
    read, length = 0, 0
    for text in _texts(config, split):
        read += len(text.encode())
        length += len(made.encode(text).ids)
        if read > _SAMPLE_BYTES:
            break
    console.print(f"Written: {path}, {size:,} ids; {read / max(length, 1):.2f} bytes a token.")
    console.print(f"Use: --config.data.tokenizer=hf:{folder}", markup=False)
    return EXIT_OK


def _texts(config: Config, split_field: str) -> Iterator[str]:
    data = config.data
    sources = [share.source for share in parse_mixture(data.mixture)] or [data.source]
    fields = (data.text_field, data.answer_field) if data.answer_field else (data.text_field,)
    for source in sources:
        opened = open_source(source, data.directory, fields, data.validation_percent)
        if not hasattr(opened, "documents"):
            raise ConfigError(
                "data.source", source, "is tokenised already.", "Use the text it was made from."
            )
        split = getattr(data, split_field)
        for record in opened.documents(split, f"data.{split_field}"):
            if not isinstance(record, BadRecord):
                yield from _parts(record)
            elif data.max_bad == 0.0:
                raise UserError(f"data.source={source!r}: {record}. Mend it, or set data.max_bad.")


def _parts(record: Record) -> Iterator[str]:
    parts = (record.prompt, record.answer) if isinstance(record, Answer) else (record,)
    for part in parts:
        text = part.decode(errors="replace") if isinstance(part, bytes) else part
        if text:
            yield text
