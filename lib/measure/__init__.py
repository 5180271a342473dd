"""How an op is judged: the registry of ops, the float64 check, the clock, ceilings, and ways to be fooled."""
