"""Loss spikes, and noise that is none."""

from mlxlm.train.spike_detector import SpikeDetector


def test_spike():
    detector = SpikeDetector(1.0)
    assert [detector.problem(loss, 1.0) for loss in [3.0] * 12 + [6.0] + [3.0] * 9] == [None] * 22  # one noisy batch
    problems = [detector.problem(6.0, 1.0) for _ in range(5)]
    assert problems[2] is None and problems[3] == "the loss rose from 3.00 to 4.20 (means of 10 steps)"


def test_steps_without_targets_are_ignored():
    detector = SpikeDetector(1.0)
    assert [detector.problem(*((0.0, 0.0) if i % 3 else (3.0, 1.0))) for i in range(90)] == [None] * 90
    assert detector.healthy and detector.state == {"recent": [3.0] * 10, "lowest": 3.0}
    assert [detector.problem(4.5, 1.0) for _ in range(10)][-1] is not None
