"""Eight emulated CPU devices for every test, set up as `run.py` does."""

from jaxtpu import environment

environment.prepare(8)  # before anything imports JAX
