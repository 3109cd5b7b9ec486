"""The loop by itself, with steps that the test finishes when it likes."""

import signal

import pytest

from jaxtpu.observe.log import LogHook, Rates
from jaxtpu.train import loop as loop_module
from jaxtpu.train.loop import Clock, StopRequest, every, train_loop


class Devices:
    """Counts what was dispatched and what was waited for."""

    def __init__(self, monkeypatch):
        self.dispatched, self.finished, self.most = 0, 0, 0
        monkeypatch.setattr(loop_module.jax, "block_until_ready", self.finish)

    def train_step(self, state, batch):
        self.dispatched += 1
        self.most = max(self.most, self.dispatched - self.finished)
        metrics = {"loss": float(batch), "grad_norm": 0.0, "learning_rate": 1.0, "tokens": 2.0}
        return state + 1, metrics | {"dropped": 0.0}

    def finish(self, metrics):
        self.finished += 1
        return metrics


@pytest.fixture
def devices(monkeypatch):
    return Devices(monkeypatch)


def run(devices, hooks, *, steps=10, start=0, max_in_flight=3, stop=None):
    batches = ((number, f"after {number}") for number in range(start + 1, 1000))
    return train_loop(
        devices.train_step,
        start,
        batches,
        start=start,
        steps=steps,
        max_in_flight=max_in_flight,
        hooks=hooks,
        stop=StopRequest() if stop is None else stop,
        clock=Clock(),
    )


def test_dispatch_runs_ahead_by_the_bound_and_no_further(devices):
    ahead = []
    run(devices, [lambda p: ahead.append(p.step - p.clock.completed_step)])
    assert devices.most == 4  # 3 in flight, and the one that was just dispatched
    assert ahead[:-1] == [1, 2, 3, 3, 3, 3, 3, 3, 3]
    assert ahead[-1] == 0  # after the last step everything is finished


def test_hooks_run_at_their_intervals_and_at_the_end(devices):
    seen = []
    run(devices, [every(4, lambda p: seen.append((p.step, p.position)))])
    assert seen == [(4, "after 4"), (8, "after 8"), (10, "after 10")]


def test_an_interval_of_zero_is_only_at_the_end(devices):
    seen = []
    run(devices, [every(0, lambda p: seen.append(p.step))])
    assert seen == [10]


def test_a_signal_stops_after_the_step_and_runs_only_what_must(devices):
    saved, evaluated = [], []
    with StopRequest() as stop:
        hooks = [
            lambda p: signal.raise_signal(signal.SIGTERM) if p.step == 3 else None,
            every(1, lambda p: evaluated.append(p.step)),
            every(0, lambda p: saved.append(p.step), when_stopping=True),
        ]
        state, step = run(devices, hooks, stop=stop)
    assert (state, step, stop.signal) == (4, 4, signal.SIGTERM)
    assert saved == [4]
    assert evaluated == [1, 2, 3]
    assert devices.finished == devices.dispatched == 4


def test_a_second_signal_is_not_caught():
    with StopRequest() as stop, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
        assert stop
        signal.raise_signal(signal.SIGINT)


def test_metrics_are_fetched_only_once_their_steps_are_finished(devices, monkeypatch):
    emitted = []
    rates = Rates(tokens_per_byte=1.0, flops_per_token=6.0, peak_flops=None)
    log = LogHook(2, 0, rates, lambda: 0.0, lambda step, v: emitted.append((step, v["train/loss"])))
    fetched_early = []

    def hook(progress):
        before = len(emitted)
        log(progress)
        fetched_early.extend(s for s, _ in emitted[before:] if s > progress.clock.completed_step)

    run(devices, [hook], steps=7)
    assert emitted == [(2, 1.5), (4, 3.5), (6, 5.5), (7, 7.0)]  # the last interval is short
    assert fetched_early == []


def test_step_times_are_of_finished_steps_without_pauses(devices, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(loop_module.time, "perf_counter", lambda: now[0])
    emitted = {}
    rates = Rates(tokens_per_byte=1.0, flops_per_token=10.0, peak_flops=40.0)
    log = LogHook(2, 0, rates, lambda: 0.0, lambda step, values: emitted.update({step: values}))

    def work(progress):
        now[0] += 0.5  # the time of a step
        if progress.step == 5:
            with progress.clock.pause():
                now[0] += 100.0

    run(devices, [work, log], steps=8, max_in_flight=1)
    assert "speed/step_seconds" not in emitted[2]  # the start of step 1 was not seen
    assert emitted[4]["speed/step_seconds"] == pytest.approx(0.5)
    assert emitted[6]["speed/step_seconds"] == pytest.approx(0.5)
    assert emitted[4]["speed/tokens_per_second"] == pytest.approx(4.0)
    assert emitted[4]["speed/mfu"] == pytest.approx(1.0)


def test_metrics_are_means_over_tokens_not_over_steps(devices):
    emitted = {}
    rates = Rates(tokens_per_byte=1.0, flops_per_token=6.0, peak_flops=None)
    log = LogHook(2, 0, rates, lambda: 0.0, lambda step, values: emitted.update({step: values}))

    def uneven(state, batch):
        state, metrics = devices.train_step(state, batch)
        return state, metrics | {"tokens": 3.0 if batch == 1 else 1.0}

    loop = type("Loop", (), {"train_step": staticmethod(uneven)})
    run(loop, [log], steps=2)
    assert emitted[2]["train/loss"] == pytest.approx((1 * 3 + 2 * 1) / 4)
