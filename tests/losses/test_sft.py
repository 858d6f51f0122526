"""Denominators come from counts that the batch carries."""

from __future__ import annotations

import pytest

from rft.losses import SftLoss, sum_terms
from support.stub_run import join, pack


def test_next_token_counts_labels_and_not_tokens():
    batch = pack([1, 2, 3, 4], labelled=[True, False, True, True], size=8)
    assert SftLoss().count_terms(batch) == {"next_token": 2.0}


def test_weights_are_the_denominator_where_rows_carry_them():
    batch = pack([1, 2, 3, 4], weights=[0.5, 0.5, 2.0, 9.0])  # the last position has no target
    assert SftLoss().count_terms(batch)["next_token"] == pytest.approx(3.0)


def test_the_routers_term_counts_packs_with_real_tokens():
    filler = pack([], size=4)
    both = join([pack([1, 2], size=4), filler])
    assert SftLoss(router=True).count_terms(both) == {"next_token": 1.0, "router_aux": 1.0}
    assert SftLoss(router=True).count_terms(filler) == {"next_token": 0.0, "router_aux": 0.0}


def test_counts_of_micro_batches_add_up_by_term():
    assert sum_terms([{"a": 1.0, "b": 2.0}, {"a": 3.0}]) == {"a": 4.0, "b": 2.0}
