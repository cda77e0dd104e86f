"""The stand-in for Docker: a container's life, and what pytest-celery asks of one, with real processes."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis

from pgtruth_transport.testing.containers import LocalDocker
from pgtruth_transport.testing.local_containers import LocalCommand
from pgtruth_transport.testing.processes import ServerError
from tests import support

CHILD = "import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
COUNT = """
import signal, sys, time
seen = []
signal.signal(signal.SIGQUIT, lambda *_: seen.append(1))
print("ready.", flush=True)
while len(seen) < 2:
    time.sleep(0.05)
sys.exit(3)
"""


@pytest.fixture
def docker() -> Iterator[LocalDocker]:
    client = LocalDocker()
    yield client
    client.close()


def _python(docker: LocalDocker, program: str) -> LocalCommand:
    container = docker.containers.run("anything", ["python", "-c", program])
    assert isinstance(container, LocalCommand)
    return container


def test_an_exit_code_is_dockers(docker: LocalDocker) -> None:
    container = _python(docker, "import sys; sys.exit(3)")
    assert container.wait() == {"StatusCode": 3}
    assert container.attrs["State"] == {"Status": "exited", "ExitCode": 3}
    container = _python(docker, "import time; time.sleep(600)")
    assert container.attrs["State"] == {"Status": "running", "ExitCode": 0}
    container.kill("SIGKILL")
    assert container.attrs["State"] == {"Status": "exited", "ExitCode": 128 + signal.SIGKILL}


def test_what_a_main_process_leaves_behind_ends_with_it(docker: LocalDocker) -> None:
    container = _python(docker, f"{CHILD}; print(child.pid, flush=True)")
    support.eventually(lambda: container.status == "exited", 30)
    child = int(container.logs())
    support.eventually(lambda: not psutil.pid_exists(child), 10)


def test_two_signals_in_a_row_are_two(docker: LocalDocker) -> None:
    container = _python(docker, COUNT)
    support.eventually(lambda: b"ready." in container.logs(), 30)
    container.kill("SIGQUIT")
    container.kill("SIGQUIT")
    assert container.wait() == {"StatusCode": 3}


def test_a_worker_image_runs_its_own_command(docker: LocalDocker) -> None:
    arguments = {"CELERY_WORKER_NAME": "some_worker", "CELERY_WORKER_QUEUE": "some_queue"}
    image, _ = docker.images.build(tag="worker:some", buildargs=arguments)
    container = docker.containers.create(image.id)
    assert isinstance(container, LocalCommand)
    name = f"some_worker@{container.hostname}"
    assert container.command == ["celery", "-A", "app", "worker", "--loglevel=INFO", "-n", name, "-Q", "some_queue"]
    with pytest.raises(ServerError, match="image rabbitmq:4 has no command that could run here without Docker"):
        docker.containers.run("rabbitmq:4")


def test_a_folder_can_be_mounted(docker: LocalDocker, tmp_path: Path) -> None:
    container = docker.containers.create("anything", ["python"], volumes={str(tmp_path): {"bind": "/celery"}})
    assert isinstance(container, LocalCommand)
    assert container.folders == {"/celery": tmp_path}
    assert container.exec_run([sys.executable, "-c", "import os; print(os.getcwd())"]) == (0, f"{tmp_path}\n".encode())


def test_redis_answers_at_its_own_address_and_at_a_published_port(docker: LocalDocker) -> None:
    container = docker.containers.run("redis:latest", ["redis-server", "some.conf", "--maxmemory-policy", "noeviction"])
    port = int(container.attrs["NetworkSettings"]["Ports"]["6379/tcp"][0]["HostPort"])
    with (
        redis.Redis(container.attrs["Config"]["Hostname"], 6379) as inside,
        redis.Redis("127.0.0.1", port) as published,
    ):
        published.set("key", "value" * 100_000)
        assert inside.get("key") == b"value" * 100_000
        container.kill()
        with pytest.raises(redis.ConnectionError):
            published.ping()
        container.restart()
        assert published.get("key") is None
    assert b"Ready to accept connections" in container.logs()
