"""Whole models, of PyTorch's parts or of the ops', in any mixture; and which ops fit a module of yours."""
