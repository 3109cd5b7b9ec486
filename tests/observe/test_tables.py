"""What the start-up table says of the optimizer's state."""

from jaxtpu.observe.tables import _placement
from tests.tiny import programs_on, tiny_config


def test_without_host_memory_it_is_told_that_the_state_stays():
    here, there = {"placement": "device"}, {"placement": "host"}
    programs = programs_on({"fsdp": 8}, optimizer=there)
    assert _placement(tiny_config(optimizer=here), programs) == []
    ((name, told),) = _placement(tiny_config(optimizer=there), programs)
    assert name == "optimizer state" and "needs TPUs" in told
