"""From the configuration to the stream of examples that a split is."""

import dataclasses
from typing import Any

from jaxtpu.config import DataConfig
from jaxtpu.data.mixture import Mixture, parse_mixture
from jaxtpu.data.packing import PackedStream, packed
from jaxtpu.data.token_cache import Selection, open_tokens
from jaxtpu.data.tokenizer import Tokenizer


def open_split(data: DataConfig, split_field: str, tokenizer: Tokenizer) -> Any:
    """The examples of one split: a `TokenStream`, a `PackedStream`, or a `Mixture` of them.

    Args:
      split_field: `train_split` or `validation_split`.

    Raises:
      ConfigError: see `open_tokens` and `parse_mixture`.
      UserError: see `open_tokens`.
    """
    shares = parse_mixture(data.mixture)
    sources = [share.source for share in shares] or [data.source]
    streams = tuple(_open(data, source, split_field, tokenizer) for source in sources)
    if not shares:
        return streams[0]
    return Mixture(tuple(sources), streams, shares)


def over_a_run(stream: Any, examples: int) -> Any:
    """`stream`, whose shares move from the first to the last weight within so many examples."""
    return dataclasses.replace(stream, length=examples) if isinstance(stream, Mixture) else stream


def learns_answers(stream: Any) -> bool:
    """Whether the loss is on a part of the text alone."""
    return any(
        one.counted is not None
        for one in (stream.streams if isinstance(stream, Mixture) else (stream,))
    )


def _open(data: DataConfig, source: str, split_field: str, tokenizer: Tokenizer) -> Any:
    fields = (data.text_field, data.answer_field) if data.answer_field else (data.text_field,)
    selection = Selection(
        source=source,
        split=getattr(data, split_field),
        split_field=f"data.{split_field}",
        fields=fields,
        validation_percent=data.validation_percent,
        max_bad=data.max_bad,
    )
    stream = open_tokens(selection, tokenizer, data.directory, int(data.cache_gib * 2**30))
    return packed(stream, data.sequence_length) if data.packing == "pack" else stream


def words_about(stream: Any, sequence_length: int) -> list[str]:
    """What is to be known of a split beside its size, for people; of a mixture, each source."""
    streams = stream.streams if isinstance(stream, Mixture) else (stream,)
    names = stream.names if isinstance(stream, Mixture) else ("",)
    shares = stream.shares if isinstance(stream, Mixture) else (None,)
    lines = []
    for name, one, share in zip(names, streams, shares, strict=True):
        words = []
        if share:
            moving = f" -> {share.last:.0%}" if share.last != share.first else ""
            words.append(f"{name} ({share.first:.0%}{moving}): {one.num_documents:,} documents")
            words.append(f"{one.num_tokens:,} tokens")
        if one.counts.read > one.counts.used:
            words.append(str(one.counts))
        if isinstance(one, PackedStream):
            words.append(f"packed: {one.efficiency:.1%} of the sequences is text")
        elif left := one.left_over(sequence_length):
            words.append(f"{left:,} at the end fill no sequence")
        lines.append(", ".join(words))
    return [line for line in lines if line]


def words_read(stream: Any, taken: tuple[int, ...], examples: int, sequence_length: int) -> str:
    """How many examples a run has read, and how often each source was gone through.

    Args:
      taken: of each source, the examples read; empty where there is one.
      examples: read in all.
    """
    if not isinstance(stream, Mixture):
        return f"{examples:,} examples, {examples / stream.examples(sequence_length):.2f} epochs"
    parts = [
        f"{name}: {count:,} examples, {count / one.examples(sequence_length):.2f} epochs"
        for name, one, count in zip(stream.names, stream.streams, taken, strict=True)
    ]
    return "; ".join(parts)
