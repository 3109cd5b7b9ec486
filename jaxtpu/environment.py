"""Process settings that must be made before JAX or TensorFlow is imported. Imports neither."""

import glob
import importlib.util
import logging
import os
import sys
import warnings

_GOOGLE_PCI_VENDOR = "0x1ae0"
# Emulated devices meet in collectives. Ranks that wait hold threads of XLA's own pool, whose size
# is NPROC: on a small machine it starves and XLA kills the process after 40 s. Four threads a
# device prevent that; the longer time-outs are for machines that are merely slow.
_THREADS_PER_EMULATED_DEVICE = 4
_COLLECTIVE_TIMEOUT_S = 600


def has_tpu() -> bool:
    """Whether a TPU is attached, told from the PCI bus and the device files, without starting one."""
    if glob.glob("/dev/accel[0-9]*"):
        return True
    vendors = glob.glob("/sys/bus/pci/devices/*/vendor")
    return any(_read(path) == _GOOGLE_PCI_VENDOR for path in vendors)


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:  # a device that vanished, or that we may not read
        return ""


def prepare(emulated_devices: int, platform: str = "") -> None:
    """Chooses the platform, sizes the emulation, and keeps native libraries quiet.

    A platform that the user set in JAX_PLATFORMS stays. Otherwise TPUs are used where there are
    any, and CPU devices are emulated where there are none.

    Args:
      emulated_devices: CPU devices to emulate.
      platform: the one to use, whatever there is and whatever the user set; empty to choose.
    """
    if platform:
        os.environ["JAX_PLATFORMS"] = platform
    if not os.environ.get("JAX_PLATFORMS"):
        os.environ["JAX_PLATFORMS"] = "tpu,cpu" if has_tpu() else "cpu"
    if os.environ["JAX_PLATFORMS"] == "cpu":
        _emulate(emulated_devices)
    _quieten()


def _emulate(devices: int) -> None:
    threads = max(_THREADS_PER_EMULATED_DEVICE * devices, os.cpu_count() or 1)
    os.environ.setdefault("NPROC", str(threads))
    flags = os.environ.get("XLA_FLAGS", "")
    wanted = {
        "xla_cpu_collective_timeout_seconds": _COLLECTIVE_TIMEOUT_S,
        "xla_cpu_collective_call_warn_stuck_timeout_seconds": _COLLECTIVE_TIMEOUT_S,
        "xla_cpu_collective_call_terminate_timeout_seconds": _COLLECTIVE_TIMEOUT_S,
    }
    if "xla_force_host_platform_device_count" not in flags:
        wanted["xla_force_host_platform_device_count"] = devices
    extra = [f"--{name}={value}" for name, value in wanted.items() if name not in flags]
    os.environ["XLA_FLAGS"] = " ".join(filter(None, [flags, *extra]))


def _quieten() -> None:
    """Start-up chatter of TensorFlow, libtpu and XLA; errors still come through as exceptions."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # its notice, and it changes no result here
    os.environ.setdefault("TPU_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    os.environ.setdefault("NO_GCE_CHECK", "true")  # TFDS would wait for a metadata server
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # TFDS imports it; a cache it may lack


def has_libtpu() -> bool:
    """Whether the TPU compiler is installed."""
    return importlib.util.find_spec("libtpu") is not None


def emulate(devices: int = 8) -> None:
    """Where there is no accelerator, makes JAX see `devices` CPU devices; else it changes nothing.

    Call it before anything else in the process uses JAX: a backend that runs stays as it is.
    """
    prepare(devices)
    if "jax" in sys.modules:  # which has read the variable already
        sys.modules["jax"].config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
