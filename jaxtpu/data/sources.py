"""Where documents come from: one class per kind of source, found by the name in the config."""

import difflib
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from jaxtpu.data.files import FileSource
from jaxtpu.data.hugging_face import HuggingFaceSource
from jaxtpu.data.progress import told_if_slow
from jaxtpu.data.records import Record, record_of
from jaxtpu.data.token_files import TokenFiles
from jaxtpu.errors import ConfigError, UserError, nearest

_TFDS_INFO = "dataset_info.json"


class Source(Protocol):
    """A set of documents in splits.

    Attributes:
      version: changes whenever the documents can have changed.
    """

    version: str

    def documents(self, split: str, split_field: str) -> Iterator[Record]:
        """The records of `split`, in an order that never changes.

        Raises:
          ConfigError: the split does not exist or is empty; names the field `split_field`.
        """
        ...


def open_source(
    source: str, directory: str, fields: tuple[str, ...] = ("text",), percent: float = 1.0
) -> Source | TokenFiles:
    """The source called `source` in the configuration; reads no documents yet.

    Args:
      source: `KIND` or `KIND:NAME`, as `data.source` says; of TFDS also `NAME/CONFIG` and
        `NAME:VERSION`, registered or prepared already.
      directory: holds prepared data, in its folder `tfds`.
      fields: names of the features that hold the text, and the answer where there is one.
      percent: of the documents of files, in the split `validation`.

    Raises:
      ConfigError: there is no such source (`data.source`), or it has no such feature
        (`data.text_field`, `data.answer_field`).
    """
    kind, _, name = source.partition(":")
    if kind not in SOURCE_KINDS:
        raise ConfigError("data.source", source, "there is no such source.", _suggestion(source))
    if not name and kind in ("tfds", "files", "hf", "tokens"):
        raise ConfigError("data.source", source, "names nothing to read.", _suggestion(source))
    folder = pathlib.Path(directory).expanduser()
    return SOURCE_KINDS[kind](source, name, folder, fields, percent)


def _open_python_corpus(source: str, name: str, directory: pathlib.Path, fields, percent):
    from jaxtpu.data.python_corpus import PythonCorpus

    if name:
        raise ConfigError("data.source", source, "takes no name.", "Use python_corpus.")
    return TfdsSource(source, PythonCorpus(data_dir=str(directory / "tfds")), fields)


def tfds_builder(source: str, name: str, directory: pathlib.Path) -> Any:
    """The builder of a registered TFDS data set, or of a folder that one was prepared in.

    Raises:
      ConfigError: there is none.
    """
    from jaxtpu.data.quiet_tensorflow import import_tfds

    tfds = import_tfds()
    folder = pathlib.Path(name).expanduser()
    if folder.is_absolute() or (folder / _TFDS_INFO).is_file():
        if not (folder / _TFDS_INFO).is_file():
            raise ConfigError(
                "data.source", source, f"{folder} holds no prepared data set.",
                f"Name the folder of a version, which holds {_TFDS_INFO}.",
            )  # fmt: skip
        return tfds.builder_from_directory(str(folder))
    # A namespace (`huggingface:NAME`) would be looked up on the network. A version is a number.
    head, _, tail = name.partition(":")
    if tail and not tail[0].isdigit():
        raise ConfigError(
            "data.source", source, "data sets in a namespace are not read.", _suggestion(head)
        )
    try:
        return tfds.builder(name, data_dir=str(directory / "tfds"))
    except tfds.core.DatasetNotFoundError:
        registered = [f"tfds:{n}" for n in tfds.list_builders(with_community_datasets=False)]
        raise ConfigError(
            "data.source", source, "TFDS knows no such data set.", _suggestion(source, registered)
        ) from None
    except (ValueError, AssertionError, TypeError, ImportError) as error:
        # Raised for an unknown config or version, or a package that the data set needs.
        problem = str(error).strip().splitlines()[0]
        raise ConfigError("data.source", source, f"TFDS cannot open it: {problem}") from error


# Opens a source: (source, name, directory, fields, percent) -> Source.
SOURCE_KINDS: dict[str, Callable[..., Any]] = {
    "python_corpus": _open_python_corpus,
    "tfds": lambda source, name, folder, fields, _: TfdsSource(
        source, tfds_builder(source, name, folder), fields
    ),
    "files": lambda source, name, _, fields, percent: FileSource(source, name, fields, percent),
    "hf": lambda source, name, _, fields, __: HuggingFaceSource(source, name, fields),
    "tokens": lambda source, name, *_: TokenFiles(source, name),
}


class TfdsSplits:
    """The splits of a TFDS builder, prepared on first use."""

    def __init__(self, source: str, builder: Any):
        self._source, self._builder = source, builder
        self.version = builder.info.full_name

    def examples(self, split: str, split_field: str, decoders: Any) -> Iterator[dict[str, Any]]:
        """The examples of `split`, which may be of TFDS's syntax (`train[:90%]`), undecoded where
        `decoders` says so, in an order that never changes.

        Raises:
          ConfigError: there is no such split, or it is empty.
          UserError: the data set cannot be prepared.
        """
        from jaxtpu.data.quiet_tensorflow import import_tfds, silenced

        tfds = import_tfds()
        self._prepare()
        splits = self._builder.info.splits
        try:
            num_examples = splits[split].num_examples
        except (KeyError, ValueError):
            problem = f"{self._source} has no such split."
            raise ConfigError(split_field, split, problem, nearest(split, splits)) from None
        if num_examples == 0:
            filled = [name for name, info in splits.items() if info.num_examples]
            suggestion = f"Choose from: {', '.join(filled)}."
            raise ConfigError(split_field, split, f"is empty in {self._source}.", suggestion)
        with silenced():
            dataset = self._builder.as_dataset(
                split=split,
                shuffle_files=False,
                decoders=decoders,
                # A cache in memory is of no use for one pass, and warns where that is cut short.
                read_config=tfds.ReadConfig(try_autocache=False),
            )
        return dataset.as_numpy_iterator()

    def _prepare(self) -> None:
        from jaxtpu.data.quiet_tensorflow import silenced

        builder = self._builder
        try:
            if not self._is_prepared():
                with told_if_slow(f"Preparing {self._source} in {builder.data_dir}"), silenced():
                    builder.download_and_prepare()
        except Exception as error:
            # Where it is prepared now, another process was faster, and this one in its way.
            if not self._is_prepared():
                if isinstance(error, (PermissionError, FileNotFoundError, NotADirectoryError)):
                    raise ConfigError(
                        "data.directory", str(builder.data_dir),
                        f"cannot be written: {error.strerror}.", "Name a folder of yours, such as /tmp/jaxtpu.",
                    ) from error  # fmt: skip
                raise UserError(
                    f"data.source={self._source!r}: TFDS could not prepare it in "
                    f"{builder.data_dir}: {type(error).__name__}: {error}"
                ) from error
        if not builder.info.splits:  # another process prepared it since the builder was made
            builder.info.read_from_directory(builder.data_dir)

    def _is_prepared(self) -> bool:
        # TFDS warns of a folder that does not exist.
        return self._builder.data_path.exists() and self._builder.is_prepared()


class TfdsSource(TfdsSplits):
    """The documents of a TFDS builder."""

    def __init__(self, source: str, builder: Any, fields: tuple[str, ...]):
        super().__init__(source, builder)
        texts = _text_features(builder)
        for field, name in zip(("data.text_field", "data.answer_field"), fields, strict=False):
            if name not in texts:
                suggestion = nearest(name, texts) if texts else "Choose another data.source."
                problem = f"{source} has no text feature of that name."
                raise ConfigError(field, name, problem, suggestion)
        self._fields = fields

    def documents(self, split: str, split_field: str) -> Iterator[Record]:
        """See `Source.documents`, and `examples` for what is raised."""
        from jaxtpu.data.quiet_tensorflow import import_tfds

        only = import_tfds().decode.PartialDecoding(dict.fromkeys(self._fields, True))
        return (
            record_of(
                tuple(example[name] for name in self._fields),
                f"{self._source}, split {split}, record {number}",
                self._fields,
            )
            for number, example in enumerate(self.examples(split, split_field, only), 1)
        )


def _text_features(builder: Any) -> list[str]:
    """Names of the features that hold one text per example."""
    features = builder.info.features
    if not hasattr(features, "items"):
        return []
    return [n for n, f in features.items() if type(f).__name__ == "Text" and f.shape == ()]


def _suggestion(source: str, registered: list[str] = ()) -> str:
    near = difflib.get_close_matches(source, [*registered, "python_corpus"], n=1, cutoff=0.5)
    if near:
        return f"Did you mean {near[0]!r}?"
    return (
        "Use python_corpus, files:GLOB, hf:FOLDER, tokens:FILE.npy, or tfds:NAME with a NAME of "
        "tensorflow_datasets.list_builders()."
    )
