import re
import time

from jaxtpu.data import progress


def test_slow_work_is_told_and_fast_work_is_not(monkeypatch, capfd):
    with progress.told_if_slow("Waiting"):
        pass
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr(progress, "_FIRST_SECONDS", 0.05)
    with progress.told_if_slow("Waiting"):
        time.sleep(0.3)
    out, err = capfd.readouterr()
    assert out == ""
    assert re.fullmatch(r"(Waiting \.\.\. \d+ s\n)+Waiting: done in \d+ s\n", err)
