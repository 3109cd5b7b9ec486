"""A real text corpus that every machine already has: the standard library of its Python."""

import dataclasses
import hashlib
import pathlib
import platform
import sys
import sysconfig
from collections.abc import Iterator

from jaxtpu.data.quiet_tensorflow import import_tfds

tfds = import_tfds()

# Other people's packages, and tests: the latter are many, long, and full of generated tables.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_VALIDATION_PERCENT = 4


@dataclasses.dataclass
class PythonCorpusConfig(tfds.core.BuilderConfig):
    """One interpreter's library; its name is part of the folder of the prepared data."""

    root: str = ""


class PythonCorpus(tfds.core.GeneratorBasedBuilder):
    """One document per Python file: `text`, and its `path` relative to the library.

    About 4% of the files are the split `validation`, chosen by a hash of their path. A text that
    several files share is kept once, so no document is in both splits. Empty files, and files
    that are not UTF-8, are left out; the latter are counted in
    `info.metadata["undecodable_files"]`.
    """

    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS = [  # noqa: RUF012 (TFDS reads it from the class)
        PythonCorpusConfig(
            name=f"{sys.implementation.name}-{platform.python_version()}",
            description="The standard library of the running interpreter.",
            root=sysconfig.get_paths()["stdlib"],
        )
    ]

    def _info(self) -> tfds.core.DatasetInfo:
        return self.dataset_info_from_configs(
            description=type(self).__doc__,
            features=tfds.features.FeaturesDict(
                {"text": tfds.features.Text(), "path": tfds.features.Text()}
            ),
            metadata=tfds.core.MetadataDict(),
        )

    def _split_generators(self, dl_manager):
        documents, undecodable = read_documents(pathlib.Path(self.builder_config.root))
        self.info.metadata["undecodable_files"] = undecodable
        train = {path: text for path, text in documents.items() if not in_validation(path)}
        validation = {path: text for path, text in documents.items() if in_validation(path)}
        return {
            "train": self._generate_examples(train),
            "validation": self._generate_examples(validation),
        }

    def _generate_examples(self, documents: dict[str, str]) -> Iterator[tuple[str, dict]]:
        for path, text in documents.items():
            yield path, {"text": text, "path": path}


def in_validation(path: str) -> bool:
    """Whether the file at `path` (posix, relative to the library) is in the validation split."""
    digest = hashlib.sha256(path.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 100 < _VALIDATION_PERCENT


def read_documents(root: pathlib.Path) -> tuple[dict[str, str], int]:
    """The library's distinct texts by relative posix path, sorted, and how many were not UTF-8.

    The whole library is some 15 MB, so it is held in memory.
    """
    documents, seen, undecodable = {}, set(), 0
    for path in _python_files(root):
        try:
            text = (root / path).read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            undecodable += 1
            continue
        if text and text not in seen:
            seen.add(text)
            documents[path] = text
    return documents, undecodable


def _python_files(root: pathlib.Path) -> list[str]:
    files = (path.relative_to(root) for path in root.rglob("*.py") if path.is_file())
    return sorted(path.as_posix() for path in files if not _LEFT_OUT & set(path.parts[:-1]))
