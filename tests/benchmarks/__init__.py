"""Benchmarks, run by hand as `python -m tests.benchmarks.step`; pytest collects none of them."""

from jaxtpu import environment

environment.prepare(8)  # before a benchmark imports JAX
