"""Real processes that are killed, stopped and told to end: nothing is lost, and it is said who."""

import random
import re
import signal

import pytest

from jaxtpu.checkpoint import manifest
from jaxtpu.errors import EXIT_HUNG
from tests.faults.pod import Pod, losses, steps_told

STEPS, KILLS = 60, 20
WORDS = (f"--config.train.steps={STEPS}", "--config.train.evaluate_batches=1")
OFTEN = "--config.checkpoint.every=2"


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Of every run here; compiled programs are shared."""
    return (*WORDS, f"--config.compile_cache={tmp_path_factory.mktemp('compiled')}")


@pytest.fixture(scope="module")
def uninterrupted(words, tmp_path_factory):
    """The losses of two processes that nobody disturbs."""
    workdir = tmp_path_factory.mktemp("uninterrupted")
    with Pod(workdir, 2, *words) as pod:
        assert pod.wait() == [0, 0], pod.output(0) + pod.output(1)
    assert sorted(losses(workdir)) == list(range(1, STEPS + 1))
    return losses(workdir)


def saving(workdir) -> bool:
    """Whether a checkpoint is being written."""
    folder = workdir / "checkpoints"
    return folder.is_dir() and any("orbax-checkpoint-tmp" in p.name for p in folder.iterdir())


def committing(workdir) -> bool:
    """Whether one has its name, and not yet its manifest."""
    folder = workdir / "checkpoints"
    named = [p for p in folder.iterdir() if p.name.isdigit()] if folder.is_dir() else []
    return any(not manifest.is_finished(path) for path in named)


@pytest.mark.slow
def test_twenty_kills_at_random_steps_in_saves_and_in_commits_lose_nothing(
    words, uninterrupted, tmp_path
):
    chance, kills = random.Random(0), {"step": 0, "save": 0, "commit": 0}
    while sum(kills.values()) < KILLS:
        kind, victim = chance.choice(list(kills)), chance.randrange(2)
        target = steps_told(tmp_path) + chance.randint(1, 3)
        moment = {
            "step": lambda target=target: steps_told(tmp_path) >= target,
            "save": lambda: saving(tmp_path),
            "commit": lambda: committing(tmp_path),
        }[kind]
        with Pod(tmp_path, 2, *words, OFTEN) as pod:
            if not pod.until(moment):
                assert pod.wait() == [0, 0], pod.output(0) + pod.output(1)
                break  # it came to its end between two looks
            pod.kill(victim)
            kills[kind] += 1
    with Pod(tmp_path, 2, *words, OFTEN) as pod:
        assert pod.wait() == [0, 0], pod.output(0) + pod.output(1)
    print(f"{kills} of {KILLS} kills")
    assert losses(tmp_path) == uninterrupted
    assert sum(kills.values()) == KILLS and min(kills.values()) > 0, kills


@pytest.mark.parametrize("told", [(0,), (1,), (0, 1)], ids=["the first", "the other", "all"])
def test_sigterm_ends_all_processes_after_one_step(told, words, uninterrupted, tmp_path):
    with Pod(tmp_path, 2, *words) as pod:
        pod.until(lambda: steps_told(tmp_path) >= 3)
        for process in told:
            pod.kill(process, signal.SIGTERM)
        assert pod.wait() == [143, 143], pod.output(0) + pod.output(1)
        assert "Stopped by SIGTERM after step" in pod.output(0)
    done = losses(tmp_path)
    assert sorted(done) == list(range(1, len(done) + 1)) and 3 < len(done) < STEPS
    with Pod(tmp_path, 2, *words) as pod:
        assert pod.wait() == [0, 0], pod.output(0) + pod.output(1)
        assert f"restored step {len(done)}" in pod.output(0)
    assert losses(tmp_path) == uninterrupted


def test_a_process_that_stands_still_is_named_within_the_deadline(words, tmp_path):
    limits = "--config.watchdog.step=15", "--config.watchdog.save=15"  # it may stop in a save
    with Pod(tmp_path, 2, *words, *limits) as pod:
        pod.until(lambda: steps_told(tmp_path) >= 3)
        pod.kill(1, signal.SIGSTOP)
        pod.until(lambda: pod.processes[0].poll() is not None, seconds=60)
        assert pod.processes[0].returncode == EXIT_HUNG, pod.output(0)
        printed = pod.output(0)
    assert re.search(r"error: watchdog: waited more than watchdog\.(step|save)=15 s after", printed)
    assert re.search(r"late: process 1 on \S+ is silent for \d+ s, last seen in", printed)
