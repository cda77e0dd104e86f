"""The pytest-celery components, used as another project would: in its own folder, as the guide says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pgtruth_transport.testing.pytest_celery_plugin import wants_docker
from tests import support

GUIDE = support.ROOT / "docs" / "how-to" / "test-with-pytest-celery.md"
TESTS = """
import signal

from celery import chord
from pytest_celery import RESULT_TIMEOUT, ping
from pytest_celery.vendors.worker.tasks import add, sleep, xsum


def test_ready(celery_setup):
    assert celery_setup.ready(ping=True, control=True, docker=False)
    assert celery_setup.app.conf.broker_url.startswith("pgtruth://")


def test_results_and_canvas(celery_setup):
    assert ping.s().apply_async().get(timeout=RESULT_TIMEOUT) == "pong"
    assert chord([add.s(1, 2), add.s(3, 4)])(xsum.s()).get(timeout=RESULT_TIMEOUT) == 10
    celery_setup.worker.assert_log_exists("succeeded")


def test_a_killed_worker_is_restarted_and_its_job_runs(celery_setup):
    names = [i["name"] for i in celery_setup.worker.get_running_processes_info(["name"])]
    assert len(names) >= 2  # the main process and its pool
    result = sleep.s(3).apply_async()
    celery_setup.worker.wait_for_log("received")
    celery_setup.worker.kill()
    assert celery_setup.worker.container.status == "exited"
    celery_setup.worker.restart()
    assert result.get(timeout=RESULT_TIMEOUT) is True


def test_a_restarted_server_keeps_its_jobs(celery_setup):
    celery_setup.worker.kill(signal.SIGTERM)
    result = add.s(2, 3).apply_async()
    celery_setup.broker.kill()
    celery_setup.broker.restart()
    celery_setup.worker.restart()
    assert result.get(timeout=RESULT_TIMEOUT) == 5
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_another_project_tests_its_app_with_our_components(tmp_path: Path) -> None:
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", GUIDE.read_text(), re.DOTALL):
        (tmp_path / name).write_text(code)
    (tmp_path / "test_theirs.py").write_text(TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    where = os.environ.get("PGTRUTH_TEST_CONTAINERS", "local")  # docker: with PGTRUTH_PKG, the URL of our wheel
    env = os.environ | {"PYTHONPATH": str(support.ROOT), "PGTRUTH_TEST_CONTAINERS": where}
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=280)
    assert "5 passed" in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wants_docker("docker")
    assert not wants_docker("local")
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:9")
    assert not wants_docker("auto")
    with pytest.raises(pytest.UsageError, match="neither docker, local nor auto"):
        wants_docker("podman")
