from __future__ import annotations

import json
import math

from frontier_llm.training.guard.skips import SpikePolicy


def test_judges_only_after_a_full_window_and_forgets_spikes() -> None:
    policy = SpikePolicy(6.0, 4)
    assert not any(policy.is_spike(loss, 1.0) for loss in (5.0, 500.0))  # the window is not full
    policy = SpikePolicy(6.0, 4)
    for loss in (5.0, 5.1, 4.9, 5.0):
        assert not policy.is_spike(loss, 1.0)
    deviation = math.sqrt((0.1**2 + 0.1**2) / 4)
    assert policy.is_spike(5.0 + 6.01 * deviation, 1.0)
    assert policy.is_spike(5.0 + 6.01 * deviation, 1.0)  # the first spike has not changed the mean
    assert not policy.is_spike(5.0 + 5.99 * deviation, 1.0)


def test_gradient_norm_counts_too_and_low_values_do_not() -> None:
    policy = SpikePolicy(3.0, 4)
    for norm in (1.0, 1.1, 0.9, 1.0):
        policy.is_spike(5.0, norm)
    assert policy.is_spike(5.0, 1.3) and not policy.is_spike(5.0, 0.1)


def test_off_remembers_nothing() -> None:
    policy = SpikePolicy(0.0, 2)
    assert not any(policy.is_spike(loss, 1.0) for loss in (1.0, 1.0, 1e9))
    assert policy.state() == {"losses": [], "norms": []}


def test_state_survives_json_bit_for_bit() -> None:
    policy = SpikePolicy(2.0, 8)
    losses = [2.0 + math.sin(step * 12.9898) / 3 for step in range(60)]
    whole = [SpikePolicy(2.0, 8).is_spike(loss, 1.0) for loss in losses[:0]]
    undisturbed = SpikePolicy(2.0, 8)
    whole = [undisturbed.is_spike(loss, 1.0) for loss in losses]
    first = [policy.is_spike(loss, 1.0) for loss in losses[:30]]
    resumed = SpikePolicy(2.0, 8)
    resumed.restore(json.loads(json.dumps(policy.state())))
    assert first + [resumed.is_spike(loss, 1.0) for loss in losses[30:]] == whole
    assert resumed.state() == undisturbed.state() and any(whole)
