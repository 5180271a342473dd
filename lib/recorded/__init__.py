"""What was measured and printed on a GPU, and kept: results (data/results), notebooks with their outputs."""
