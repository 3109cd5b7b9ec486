"""The processes of one run: how they find each other, agree, and name who is missing."""

from jaxtpu.processes.agree import Agreement, agree, check_same
from jaxtpu.processes.common import host_of, key_value_store, primary
from jaxtpu.processes.start import Place, joined

__all__ = [
    "Agreement",
    "Place",
    "agree",
    "check_same",
    "host_of",
    "joined",
    "key_value_store",
    "primary",
]
