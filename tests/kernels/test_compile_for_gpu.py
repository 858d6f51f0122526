"""Kernels compile for GPUs that are not there, and fit their shared memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_for_gpu.py")


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_every_kernel_compiles_and_fits(capability):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    paths = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), str(capability)], env=environment | {"PYTHONPATH": paths}, capture_output=True,
        text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "_lowrank_kernel" in done.stdout
