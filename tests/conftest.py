"""Eight emulated CPU devices for every test, set up as `run.py` does; the compiler where it is."""

import platform

import pytest

from jaxtpu import environment

environment.prepare(8)  # before anything imports JAX


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Tests that ask the TPU compiler are left out only where there is none to install."""
    if not item.get_closest_marker("tpu_compile") or environment.has_libtpu():
        return
    if (platform.system(), platform.machine()) == ("Linux", "x86_64"):
        pytest.fail("libtpu is not installed: pip install -r requirements.txt", pytrace=False)
    pytest.skip("there is no libtpu for this system")
