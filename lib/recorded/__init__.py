"""Recordings from a GPU: measured results (data/results) and notebooks with their outputs."""
