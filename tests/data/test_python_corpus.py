import pathlib
import subprocess
import sys

import pytest

from jaxtpu.data.python_corpus import (
    PythonCorpus,
    PythonCorpusConfig,
    in_validation,
    read_documents,
)
from jaxtpu.data.sources import TfdsSource


@pytest.fixture
def library(tmp_path):
    """A small library with everything that is left out."""
    root = tmp_path / "lib"
    for number in range(60):
        _write(root / f"package/module{number}.py", f"x = {number}\n".encode())
    _write(root / "package/copy.py", b"x = 7\n")
    _write(root / "package/__init__.py", b"")
    _write(root / "latin.py", b"# \xe9\n")
    _write(root / "data.txt", b"text")
    for folder in ("site-packages", "test", "package/tests", "idlelib/idle_test", "__pycache__"):
        _write(root / folder / "left_out.py", b"left out")
    return root


def _write(path: pathlib.Path, text: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)


def test_only_distinct_texts_of_the_library_itself_are_read(library):
    documents, undecodable = read_documents(library)
    assert undecodable == 1
    assert list(documents) == sorted(documents)
    assert len(documents) == 60
    assert "package/copy.py" in documents
    assert "package/module7.py" not in documents  # the same text


def test_the_splits_share_no_document(library, tmp_path):
    config = PythonCorpusConfig(name="small", root=str(library))
    builder = PythonCorpus(data_dir=str(tmp_path / "tfds"), config=config)
    source = TfdsSource("small", builder, ("text",))
    train = list(source.documents("train", "data.train_split"))
    validation = list(source.documents("validation", "data.validation_split"))
    expected, _ = read_documents(library)
    assert sorted(train + validation) == sorted(text.encode() for text in expected.values())
    assert validation and not set(train) & set(validation)
    assert builder.info.metadata["undecodable_files"] == 1
    assert list(source.documents("train", "data.train_split")) == train  # in the same order


def test_the_split_of_a_file_depends_on_its_path_alone():
    paths = [f"package/module{number}.py" for number in range(5000)]
    chosen = [path for path in paths if in_validation(path)]
    assert 0.03 < len(chosen) / len(paths) < 0.05
    code = "from jaxtpu.data.python_corpus import in_validation as f; print([*map(f, {})])"
    some = [chosen[0], paths[0]]
    run = subprocess.run(
        [sys.executable, "-c", code.format(some)], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == str([in_validation(path) for path in some])
    assert run.stderr == ""  # neither TensorFlow nor TFDS said a word


def test_the_prepared_folder_is_of_one_interpreter(tmp_path):
    version = ".".join(map(str, sys.version_info[:3]))
    assert version in PythonCorpus(data_dir=str(tmp_path)).info.full_name
