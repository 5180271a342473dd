"""Fixtures and skips that all tests share."""

import os

from lib import machine
from lib.course import progress

import pytest
import torch


def pytest_configure(config):
    # The reader's predictions and progress are not for tests to write.
    os.environ["FUSED_KERNELS_READER"] = "/dev/null/reader"
    # With no GPU, CUDA kernels run under the checker: a wrong one is an error, not a crash of pytest.
    os.environ["CUDA_ON_CPU_CHECKED"] = "1"


def pytest_collection_modifyitems(items):
    no_gpu = pytest.mark.skip(reason="needs a GPU")
    for item in items:
        if "gpu" in item.keywords and not machine.HAS_GPU:
            item.add_marker(no_gpu)


@pytest.fixture(autouse=True)
def _same_random_numbers():
    torch.manual_seed(0)


@pytest.fixture
def reader_folder(tmp_path, monkeypatch):
    """An empty folder for the reader's files."""
    monkeypatch.setattr(progress, "_in_memory", {})
    monkeypatch.setenv("FUSED_KERNELS_READER", str(tmp_path / "reader"))
    return tmp_path / "reader"


@pytest.fixture
def device():
    return machine.device()
