import pytest

from jaxtpu.plan import workers


@pytest.fixture
def started(monkeypatch) -> list[workers.Worker]:
    """The workers that a test starts."""
    seen: list[workers.Worker] = []
    start = workers.start_worker

    def start_and_note(*arguments):
        seen.append(start(*arguments))
        return seen[-1]

    monkeypatch.setattr(workers, "start_worker", start_and_note)
    return seen
