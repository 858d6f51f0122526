"""What a process may use of its machine."""

from __future__ import annotations

import pytest
import torch

from rft.training import machine


@pytest.mark.parametrize(
    ("text", "cores"),
    [("max 100000\n", 8), ("200000 100000\n", 2), ("50000 100000\n", 1), ("1600000 100000\n", 8), ("nonsense", 8)],
)
def test_cores_are_those_of_the_container(tmp_path, monkeypatch, text, cores):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _pid: set(range(8)))
    (tmp_path / "cpu.max").write_text(text)
    assert machine.usable_cores(tmp_path / "cpu.max") == cores
    assert machine.usable_cores(tmp_path / "none") == 8


def test_threads_without_a_core_are_given_up_unless_the_user_asked_for_them(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(machine, "usable_cores", lambda: 1)
    try:
        torch.set_num_threads(2)
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        machine.limit_threads()
        assert torch.get_num_threads() == 2
        monkeypatch.delenv("OMP_NUM_THREADS")
        machine.limit_threads()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
