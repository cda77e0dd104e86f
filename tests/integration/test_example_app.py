"""The example application: its settings by environment, and what its tasks do when a body is called directly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.error import HTTPError

import pytest
from celery import Task
from PIL import Image

from celery_app import recorder, schedule
from celery_app.settings import AppSettings, WrongSetting
from tasks.cleanup import remove_old_files
from tasks.reports import Measure, measure_image, start_report, summarise, write_summary
from tasks.thumbnails import make_thumbnail, thumbnail_name
from tasks.troubles import NotYet, crash, flaky, slow
from tasks.webhooks import send_webhook

IMAGES = AppSettings().images


# settings


def test_defaults_need_no_environment() -> None:
    settings = AppSettings.from_env({})
    assert settings == AppSettings()
    assert settings.signal_url is None
    assert settings.celery()["result_backend"] == "pgtruth://"


def test_settings_come_from_the_environment() -> None:
    settings = AppSettings.from_env(
        {
            "BROKER_URL": "pgtruth://u:p@db/jobs",
            "RESULT_BACKEND": "redis://cache",
            "SIGNAL_URL": "redis://cache/1",
            "LEASE_SECONDS": "60",
            "OUTPUT_DIR": "/srv/out",
        }
    )
    conf = settings.celery()
    assert conf["broker_url"] == "pgtruth://u:p@db/jobs"
    assert conf["result_backend"] == "redis://cache"
    assert conf["broker_transport_options"] == {
        "signal_url": "redis://cache/1",
        "lease_seconds": 60.0,
        "reap_interval": 5.0,
    }
    assert settings.output == Path("/srv/out")


def test_an_empty_variable_keeps_the_default() -> None:
    assert AppSettings.from_env({"SIGNAL_URL": "", "BROKER_URL": ""}) == AppSettings()


@pytest.mark.parametrize("value", ["soon", "0", "-3"])
def test_a_wrong_number_names_its_variable(value: str) -> None:
    with pytest.raises(WrongSetting, match=f"LEASE_SECONDS is '{value}'"):
        AppSettings.from_env({"LEASE_SECONDS": value})


def test_every_scheduled_task_exists() -> None:
    from celery_app import app

    app.loader.import_default_modules()
    for name, entry in schedule.entries(AppSettings()).items():
        assert entry["task"] in app.tasks, name


# thumbnails


@pytest.mark.parametrize("source", sorted(IMAGES.iterdir()), ids=lambda path: path.name)
def test_thumbnail_of_every_shipped_image(source: Path, tmp_path: Path) -> None:
    made = make_thumbnail(str(source), str(tmp_path), 96)
    with Image.open(made["path"]) as image:
        assert image.format == "JPEG"
        assert image.size == (made["width"], made["height"])
    assert max(made["width"], made["height"]) == 96
    assert [path.name for path in tmp_path.iterdir()] == [thumbnail_name(str(source), 96)]


def test_thumbnail_twice_leaves_one_file(tmp_path: Path) -> None:
    source = str(IMAGES / "sunset.jpg")
    assert make_thumbnail(source, str(tmp_path)) == make_thumbnail(source, str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 1


def test_thumbnail_of_no_image_leaves_nothing(tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"not an image")
    with pytest.raises(OSError, match="identify image"):
        make_thumbnail(str(broken), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


# reports


def test_report_of_the_shipped_images(tmp_path: Path) -> None:
    measures = [measure_image(str(source)) for source in sorted(IMAGES.iterdir())]
    summary = write_summary(measures, "all", str(tmp_path))
    written = json.loads((tmp_path / "all.json").read_text())
    assert written == {"summary": summary, "images": measures}
    assert summary["images"] == len(measures) == len(list(IMAGES.iterdir()))
    assert [path.name for path in tmp_path.iterdir()] == ["all.json"]


def test_summary_of_nothing() -> None:
    assert summarise("none", []) == {"name": "none", "images": 0, "pixels": 0, "brightest": ""}


def test_summary_adds_up() -> None:
    two = [Measure(name="a", width=2, height=3, brightness=9.0), Measure(name="b", width=1, height=1, brightness=10.5)]
    assert summarise("two", two) == {"name": "two", "images": 2, "pixels": 7, "brightest": "b"}


def test_a_report_on_an_empty_folder_starts_nothing(tmp_path: Path) -> None:
    start_report(str(tmp_path), str(tmp_path))  # would need a broker if it published anything


# webhooks


class _Recipient(BaseHTTPRequestHandler):
    seen: ClassVar[list[tuple[str | None, bytes]]] = []
    status = 204

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.seen.append((self.headers["Idempotency-Key"], body))
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def recipient() -> Iterator[tuple[str, type[_Recipient]]]:
    handler = type("Recipient", (_Recipient,), {"seen": [], "status": 204})
    server = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/hook", handler
    server.shutdown()
    server.server_close()
    thread.join()


def test_webhook_sends_json_with_the_job_id_as_key(recipient: tuple[str, type[_Recipient]]) -> None:
    url, handler = recipient
    assert _attempt(send_webhook, 0, url, {"order": 7}) == 204
    assert handler.seen == [("job-1", b'{"order": 7}')]


def test_webhook_refused_is_an_error(recipient: tuple[str, type[_Recipient]]) -> None:
    url, handler = recipient
    handler.status = 503
    with pytest.raises(HTTPError, match="503") as caught:
        _attempt(send_webhook, 0, url, {})
    assert caught.value.fp.closed


# troubles


def test_flaky_fails_so_many_attempts() -> None:
    for attempt in (0, 1):
        with pytest.raises(NotYet, match=f"attempt {attempt} of 2"):
            _attempt(flaky, attempt, 2)
    assert _attempt(flaky, 2, 2) == 2


def test_slow_takes_its_time() -> None:
    begin = time.monotonic()
    assert slow(0.05) == 0.05
    assert time.monotonic() - begin >= 0.05


def test_crash_survives_once_it_has_crashed_enough() -> None:
    assert _attempt(crash, 1, 1) == 1


def test_crash_kills_its_process() -> None:
    body = "from tasks.troubles import crash; crash.push_request(id='x', retries=0); crash.run(1)"
    assert subprocess.run([sys.executable, "-c", body], check=False).returncode == -signal.SIGKILL


# clean-up


def test_clean_up_removes_old_files_only(tmp_path: Path) -> None:
    old, young = tmp_path / "deep" / "old.txt", tmp_path / "young.txt"
    old.parent.mkdir()
    old.touch()
    young.touch()
    os.utime(old, (time.time() - 7200, time.time() - 7200))
    assert remove_old_files(str(tmp_path), 1.0) == 1
    assert not old.exists()
    assert young.exists()


def test_clean_up_of_a_missing_folder(tmp_path: Path) -> None:
    assert remove_old_files(str(tmp_path / "none"), 1.0) == 0


# the recorder


def test_the_recorder_counts_starts_and_returns(tmp_path: Path) -> None:
    file = tmp_path / "runs"
    recorder._append(file, "start", "a", "t")
    recorder._append(file, "return", "a", "t")
    recorder._append(file, "start", "a", "t")
    with file.open("a") as half:
        half.write('{"what": "sta')  # a kill in the middle of a line
    runs = recorder.read(file)
    assert runs.started == {"a": 2}
    assert runs.returned == {"a": 1}
    assert runs.by_task == {"t": 2}


def test_no_file_means_no_runs(tmp_path: Path) -> None:
    assert not recorder.read(tmp_path / "none").started


def _attempt(task: Task, number: int, *args: object) -> object:
    """Call a bound task's body as attempt ``number`` of the job ``job-1``."""
    task.push_request(id="job-1", retries=number, args=args)
    try:
        return task.run(*args)
    finally:
        task.pop_request()
