import pytest

from tests.config import TINY

CONFIG = f"--config={TINY}"


@pytest.mark.parametrize("text", ["{", "[3]", '{"model": {"headz": 4}}'])
def test_a_folder_with_a_broken_config_json_is_left_alone(text, refused, tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text(text)
    said = refused(CONFIG, f"--workdir={tmp_path}/run", "--config.compile_cache=")
    assert said.startswith(f"--workdir='{tmp_path}/run': it is not known whose run it holds: ")
    assert "Choose another --workdir" in said


def test_a_folder_that_cannot_be_made_is_refused(refused):
    said = refused(CONFIG, "--workdir=/proc/none/run", "--config.compile_cache=")
    assert said.startswith("--workdir='/proc/none/run': cannot be written: ")
