"""Whole models, of PyTorch's parts or of the ops', in any mixture: what fusing is worth from end to end."""
