"""The progress of `generate --jsonl`."""

import pytest


@pytest.fixture
def job_progress():
    from mlxlm.cli.job_progress import JobProgress

    job_progress = JobProgress(2)
    job_progress.begin(10)
    return job_progress


def test_the_total_follows_the_lines(job_progress):
    assert job_progress.expected == 20
    for rows in (2, 0, 1, 5):
        job_progress.expect(rows)
    assert job_progress.expected == 20 + 0 - 2 - 1 + 3
    job_progress.results, job_progress.skipped, job_progress.tokens = 4, 6, 1000
    assert job_progress.line().startswith("10 of 20 done, ") and job_progress.line().endswith(" left")


def test_a_line_per_minute_without_a_terminal(job_progress, capsys, monkeypatch):
    from mlxlm.cli import job_progress as module

    clock = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    job_progress.begin(None)
    with module.progress(job_progress) as show:
        for _ in range(180):
            clock[0] += 1
            job_progress.results, job_progress.tokens = job_progress.results + 1, job_progress.tokens + 10
            show()
    assert capsys.readouterr().err == "".join(f"{n} done, 10 tokens/s\n" for n in (60, 120, 180))
