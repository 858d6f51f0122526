"""Kernels run on the GPU if there is one, else in Triton's interpreter, which has to be chosen before they are imported."""

import os

import pytest
import torch

# Set before any test imports Triton by tests/conftest.py; here for a run in which that one is left out.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def device() -> torch.device:
    torch.manual_seed(0)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
