"""Checkpoints: one verified unit a step, written by Orbax, restored onto any mesh."""

from jaxtpu.checkpoint.read import SavedRun
from jaxtpu.checkpoint.store import Checkpoints, SaveError
from jaxtpu.checkpoint.structure import MismatchError

__all__ = ["Checkpoints", "MismatchError", "SaveError", "SavedRun"]
