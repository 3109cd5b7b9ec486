"""Data sets that the library `datasets` saved to a folder."""

import os
import pathlib
from collections.abc import Iterator

from jaxtpu.data.records import Record, record_of
from jaxtpu.errors import ConfigError, nearest


class HuggingFaceSource:
    """A folder that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote.

    A `Dataset` by itself has one split, `train`.
    """

    def __init__(self, source: str, folder: str, fields: tuple[str, ...]):
        """Opens the folder; reads no record.

        Raises:
          ConfigError: the library is not installed, the folder is no data set, or a field is not
            in it.
        """
        try:
            import datasets
        except ImportError:
            raise ConfigError(
                "data.source", source, "needs the library datasets, which is not installed.",
                "Run: pip install datasets",
            ) from None  # fmt: skip
        path = pathlib.Path(folder).expanduser()
        try:
            opened = datasets.load_from_disk(str(path))
        except (OSError, ValueError) as error:
            raise ConfigError(
                "data.source", source, f"is no saved data set: {str(error).splitlines()[0]}",
                "Name a folder that save_to_disk wrote.",
            ) from None  # fmt: skip
        self._splits = dict(opened) if isinstance(opened, dict) else {"train": opened}
        self._source, self._fields = source, fields
        for split in self._splits.values():
            for field, name in zip(("data.text_field", "data.answer_field"), fields, strict=False):
                if name not in split.column_names:
                    raise ConfigError(
                        field, name, f"{source} has no such column.",
                        nearest(name, split.column_names),
                    )  # fmt: skip
        prints = [split._fingerprint for split in self._splits.values()]
        self.version = "-".join([*prints, str(os.stat(path).st_mtime_ns)])

    def documents(self, split: str, split_field: str) -> Iterator[Record]:
        """See `Source.documents`."""
        if split not in self._splits:
            raise ConfigError(
                split_field, split, f"{self._source} has no such split.",
                nearest(split, self._splits),
            )  # fmt: skip
        rows = self._splits[split].select_columns(list(self._fields))
        if len(rows) == 0:
            raise ConfigError(split_field, split, f"is empty in {self._source}.")
        return (
            record_of(
                tuple(row[name] for name in self._fields),
                f"{self._source}, split {split}, row {number}",
                self._fields,
            )
            for number, row in enumerate(rows, 1)
        )
