"""Workers, with tasks that need no compiler."""

import os
import signal
import sys
import time

from jaxtpu.plan import workers


def odd_worker():
    """What the workers of the next tests run."""

    def handle(task):
        print("noise")
        if task["do"] == "abort":
            os.abort()
        if task["do"] == "exit":
            print("ERROR: no such flag", file=sys.stderr)
            os._exit(3)
        if task["do"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if task["do"] == "sleep":
            time.sleep(60)
        return {"did": task["do"]}

    workers.serve(handle)


def odd_pool(size: int) -> workers.Pool:
    return workers.Pool("tests.plan.test_workers:odd_worker", dict(os.environ), size)


def test_a_worker_that_dies_fails_its_task_only(started, capfd):
    tasks = {f"{i}": {"do": do} for i, do in enumerate(("a", "abort", "exit", "b", "kill", "c"))}
    with odd_pool(2) as pool:
        answers = dict(pool.run(tasks))
    assert [answers[key] for key in "035"] == [{"did": "a"}, {"did": "b"}, {"did": "c"}]
    assert answers["1"].reason == "the process crashed (SIGABRT)"
    assert answers["2"].reason == "the process ended with exit code 3: ERROR: no such flag"
    assert "SIGKILL" in answers["4"].reason and "out of memory" in answers["4"].reason
    assert len(started) <= 5 and all(w.process.returncode is not None for w in started)
    assert capfd.readouterr() == ("", "")


def test_what_is_late_is_given_up(started):
    begin = time.monotonic()
    with odd_pool(2) as pool:
        tasks = {"a": {"do": "sleep"}, "b": {"do": "b"}}
        answers = dict(pool.run(tasks, deadline=begin + 3))
    assert answers == {"b": {"did": "b"}} and time.monotonic() - begin < 20
    assert all(worker.process.returncode == -signal.SIGKILL for worker in started)
