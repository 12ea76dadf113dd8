"""The learner's tests run real DeepSpeed ranks on CPUs, one process each."""

import os

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks inherit it


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "soak: the full matrix; `make soak` runs it")
