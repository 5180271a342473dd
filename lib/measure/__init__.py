"""Judging an op: the registry of ops, the float64 check, timing, ceilings, and ways to cheat."""
