"""The Python interface: models, losses and data of one's own on the same step, loop and mesh."""
