"""What the tests of ops share."""

import importlib

import pytest


@pytest.fixture
def module(request):
    """The op file that a test file is about: lib/ops/gelu.py for test_gelu.py. Mutants take its place."""
    return importlib.import_module(f"lib.ops.{request.module.__name__.rpartition('test_')[2]}")
