"""The demo's judge, and that none of its processes outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from celery_app.demo.fleet import Fleet
from celery_app.demo.payments import Charges
from celery_app.demo.score import Job, Score, TaskLine, Verdict, judge
from celery_app.demo.screen import Screen, complaints
from celery_app.demo.work import Submitted
from celery_app.recorder import Runs
from tests.support import eventually

ROOT = Path(__file__).resolve().parents[2]


def _judge(*jobs: Job, p95: float = 1.0, charges: dict[str, int] | None = None, **started: int) -> Verdict:
    """The verdict on these jobs, all of them handed in, of which ``hopeless`` was meant to fail."""
    score = Score({job.id: job for job in jobs}, [], {}, (0.5, p95, 9.0), 0, {})
    submitted = Submitted(ids={"a"}, hopeless={"hopeless"})
    return judge(score, Runs(Counter(started), Counter(), Counter(), {}), submitted, Charges(charges or {}, 9))


def test_all_is_well() -> None:
    verdict = _judge(Job("a", "done", 1, 1, 0, 0), Job("b", "done", 2, 1, 1, 0), a=1, b=2, charges={"order": 1})
    assert verdict.well
    assert complaints(verdict) == []


@pytest.mark.parametrize("status", ["queued", "processing", "enqueue_failed"])
def test_a_job_that_has_not_ended_is_lost(status: str) -> None:
    assert _judge(Job("a", status, 0, 0, 0, 0)).lost == {"a"}


def test_a_job_without_a_row_is_lost() -> None:
    assert _judge(a=1).lost == {"a"}


def test_two_ends_are_doubled() -> None:
    assert _judge(Job("a", "done", 2, 2, 0, 0), a=2).doubled == {"a"}


def test_a_run_without_a_claim_of_its_own_is_doubled() -> None:
    assert _judge(Job("a", "done", 1, 1, 0, 0), a=2).doubled == {"a"}


def test_a_lease_that_ran_out_though_its_worker_was_well_is_doubled() -> None:
    assert _judge(Job("a", "done", 2, 1, 1, 1), a=2).doubled == {"a"}


def test_only_the_hopeless_may_fail() -> None:
    verdict = _judge(Job("hopeless", "failed", 4, 1, 0, 0), Job("a", "failed", 4, 1, 0, 0))
    assert verdict.broken == {"a"}
    assert not verdict.well


@pytest.mark.parametrize("charges", [0, 2])
def test_an_order_is_charged_once(charges: int) -> None:
    verdict = _judge(Job("a", "done", 1, 1, 0, 0), a=1, charges={"order": charges, "other": 1})
    assert verdict.charges == {"order"}
    assert not verdict.well


def test_late_is_a_p95_over_the_objective() -> None:
    done = Job("a", "done", 1, 1, 0, 0)
    assert _judge(done, p95=25.0).well
    verdict = _judge(done, p95=25.1)
    assert verdict.late == 25.1
    assert "LATE" in complaints(verdict)[0]


def test_the_final_tables_fit_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    jobs = {name: Job(name, "done", 1, 1, 0, 0) for name in "abc"}
    lines = [TaskLine("tasks.thumbnails.make_thumbnail_of_everything", 1600, 1600, 1000, 0, 123.456)]
    score = Score(
        jobs, lines, {"stale_writes": 7}, (1.0, 2.0, 3.0), 0, {"done": 1000, "lease_expired": 10, "failed": 99}
    )
    charges = Charges({"order": 1}, 3)
    runs = Runs(Counter(), Counter(), Counter(), {})
    verdict = judge(score, runs, Submitted(ids={"lost" * 9}), charges)
    with Screen() as screen:
        screen.final("redis", score, runs, charges, verdict)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "LOST: 1: lostlost" in shown
    assert "Nothing lost" not in shown


def test_the_fleet_ends_its_groups(tmp_path: Path) -> None:
    with Fleet(tmp_path, os.environ, ROOT) as fleet:
        member = fleet.start("sleeper", ["timeit", "-n1", "import time; time.sleep(600)"])
        os.kill(member.pid, signal.SIGSTOP)  # a stopped process must not outlive the demo either
        assert member.alive()
        assert fleet.fallen() == []
    assert not member.alive()


def test_a_killed_demo_leaves_nothing_behind(tmp_path: Path) -> None:
    """SIGKILL leaves no time for cleaning up: the leash does it."""
    code = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from celery_app.demo.fleet import Fleet\n"
        f"with Fleet(Path({str(tmp_path)!r}), os.environ, Path({str(ROOT)!r})) as fleet:\n"
        "    member = fleet.start('sleeper', ['timeit', '-n1', 'import time; time.sleep(600)'])\n"
        "    print(member.pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT) as demo:
        assert demo.stdout is not None
        group = int(demo.stdout.readline())
        os.killpg(group, 0)
        demo.kill()
    eventually(lambda: not _exists(group), 10)


def _exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return not _zombie(group)


def _zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return False
