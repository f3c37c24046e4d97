"""Whether draws are as likely as they are said to be."""

import numpy as np


def assert_drawn(slots, probabilities, most=5.0):
    """Chi-square of draws, int [n], against probabilities, float [slots].

    Slots that are expected less than five times are put together; none of probability 0 may
    be drawn. Fails `most` standard deviations above what chance gives. Draws that are
    stratified give less than chance.
    """
    probabilities = np.asarray(probabilities, np.float64)
    slots = np.asarray(slots).reshape(-1)
    counts = np.bincount(slots, minlength=len(probabilities))
    assert len(counts) == len(probabilities)
    assert not counts[probabilities == 0].any(), "drawn, though impossible"
    expected = probabilities / probabilities.sum() * len(slots)
    order = np.argsort(expected, kind="stable")
    group = np.maximum(np.floor(np.cumsum(expected[order]) / 5), 0).astype(np.int64)
    _, group = np.unique(group, return_inverse=True)
    expected = np.bincount(group, expected[order])
    counts = np.bincount(group, counts[order])
    kept = expected > 1e-9
    if kept.sum() == 1:
        assert counts[kept] == len(slots)
        return
    chi_square = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    freedom = kept.sum() - 1
    deviations = (chi_square - freedom) / np.sqrt(2 * freedom)
    assert deviations < most, f"{chi_square=:.1f} for {freedom} degrees of freedom"
