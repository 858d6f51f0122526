"""Kernels run on the GPU if there is one, else in Triton's interpreter, which has to be chosen before they are imported."""

import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    if not getattr(sys.modules.get("rft.kernels.launch"), "INTERPRETED", True):
        for name in [name for name in sys.modules if name.startswith("rft.kernels.")]:
            del sys.modules[name]


@pytest.fixture
def device() -> torch.device:
    torch.manual_seed(0)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
