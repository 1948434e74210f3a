"""Kernels for accelerators. A module here imports its compiler, so it is itself imported when it is first used."""
