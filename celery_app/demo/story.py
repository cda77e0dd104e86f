"""The demo's story: hand in work, and on the way freeze a worker, kill a worker, flush the signal, double the wake-ups.

Each step waits for what it needs to see (a body running, a lease taken over, a write refused), never for a time, and
each wait has a deadline.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import psycopg

from celery_app import recorder
from celery_app.demo import payments, score, work
from celery_app.demo.screen import Screen
from celery_app.demo.stage import CONCURRENCY, Stage, Trouble
from pgtruth_transport.signals import wake_channel

RATE = 12.0  # jobs handed in a second, so that there is work while everything happens
DUPLICATES = 50
LONG = 2.0  # seconds of the jobs that a frozen or killed worker holds


class Story:
    """Runs the steps in order; :meth:`tick` goes on in between."""

    def __init__(self, stage: Stage, screen: Screen, connection: psycopg.Connection[Any]) -> None:
        self.stage, self.screen, self.connection = stage, screen, connection
        self.submitted = work.Submitted()
        self.victims: list[str] = []  # workers whose leases may run out, because of what the story does to them
        settings = stage.settings
        self._jobs = work.jobs(settings.images, settings.output, stage.gateway, self.submitted)
        self._feeding = False
        self._feed_at = self._look_at = 0.0
        self.handed_in_all = False

    def run(self) -> None:
        """From the first job to the last terminal state."""
        self._hand_in_long_jobs(2 * CONCURRENCY)
        bad = payments.misbehave(self.stage.gateway)
        self.screen.say(f"the payment gateway will hang, cut lines or fail for {bad} orders", "yellow")
        frozen = self._freeze("one")
        self._feeding, self._feed_at = True, time.monotonic()
        self.until("work going on", 10, lambda: len(self.submitted.ids) > 40)
        self._kill("two", replacement="three")
        self._lose_signals()
        self._double_wakeups()
        self._take_over(frozen)
        self._thaw("one")
        self.until("everything handed in", 45, lambda: self.handed_in_all)
        self.until("every job to end", 45, self._all_ended)
        self._ignore_wakeups()

    # steps

    def _hand_in_long_jobs(self, count: int) -> None:
        for result in work.long_jobs(count, LONG):
            self.submitted.add(result)
            self.submitted.long.add(result.id)

    def _freeze(self, name: str) -> set[str]:
        """Stop the main process of a worker that has bodies running; its children go on and finish them."""
        worker = self.stage.workers[name]
        self.until(f"worker {name} to run something", 10, lambda: bool(self._running_at(worker.pid)))
        held = self._running_at(worker.pid)
        self.victims.append(name)
        os.kill(worker.pid, signal.SIGSTOP)
        self.screen.say(f"worker {name} is frozen (SIGSTOP) with {len(held)} running job(s)", "yellow")
        return held

    def _kill(self, name: str, replacement: str) -> None:
        """``kill -9`` a worker with everything that it started, while it runs something; start another."""
        worker = self.stage.workers[name]
        self._hand_in_long_jobs(CONCURRENCY)
        self.until(f"worker {name} to run something long", 15, lambda: self._holds_long(worker.pid))
        held = self._running_at(worker.pid)
        self.victims.append(name)
        self.stage.fleet.kill(worker)
        self.screen.say(f"worker {name} is dead (kill -9, whole group), {len(held)} job(s) running", "red")
        fresh = self.stage.start_worker(replacement)
        self.until(f"worker {replacement} to be ready", 20, lambda: fresh.says(" ready."))
        self.screen.say(f"worker {replacement} is up")

    def _lose_signals(self) -> None:
        """FLUSHALL, or cut every listening connection: whatever was signalled is gone."""
        if self.stage.redis_url is None:
            cut = score.ask(self.connection, "listeners_cut")
            self.screen.say(f"{len(cut)} listening connection(s) cut: wake-ups are lost", "yellow")
        else:
            self._redis.flushall()
            self.screen.say("Redis is flushed (FLUSHALL)", "yellow")

    def _double_wakeups(self) -> None:
        """Signal jobs that have ended long ago once more, as a queue that delivers twice would."""
        ended = [job_id for job_id, runs in recorder.read(self._runs_file).returned.items() if runs]
        for number in range(DUPLICATES):
            self._wake(ended[number % len(ended)])
        self.screen.say(f"{DUPLICATES} duplicate wake-ups published", "yellow")

    def _ignore_wakeups(self) -> None:
        """Once more, to workers that have nothing to do: a wake-up that finds nothing is counted."""
        ended = iter(sorted(self.submitted.ids))

        def ignored() -> bool:
            self._wake(next(ended))
            return self._counter("wakeups_ignored") > 0

        self.until("a duplicate wake-up to be ignored", 5, ignored)

    def _wake(self, job_id: str) -> None:
        channel = wake_channel("pgtruth", "celery")
        if self.stage.redis_url is None:
            self.connection.execute("SELECT pg_notify(%s, '')", (channel,))
        else:
            self._redis.publish(channel, job_id)

    def _take_over(self, frozen: set[str]) -> None:
        def taken_over() -> bool:
            return bool(score.ask(self.connection, "taken_over", ids=list(frozen)))

        self.until("the frozen worker's jobs to be taken over", 30, taken_over)
        self.screen.say("the frozen worker's leases ran out, its jobs are claimable again")

    def _thaw(self, name: str) -> None:
        """Let the frozen worker go on: it believes that it still owns its jobs, and hands in their results."""
        os.kill(self.stage.workers[name].pid, signal.SIGCONT)
        self.until("a stale write to be refused", 15, lambda: self._counter("stale_writes") > 0)
        self.screen.say(f"worker {name} is awake again; its late writes were refused")

    # looking

    def until(self, what: str, seconds: float, condition: Callable[[], bool]) -> None:
        """Go on until ``condition`` holds; too late is trouble."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise Trouble(f"waited {seconds:.0f} s for {what}")
            self.tick()
            time.sleep(0.05)

    def tick(self) -> None:
        """Hand in what is due, show the progress, notice what fell over."""
        self._feed()
        if time.monotonic() - self._look_at > 0.3:
            self._look_at = time.monotonic()
            known, ended = score.ask(self.connection, "progress")[0]
            self.screen.progress(ended, known, len(self.submitted.ids))
            for member in self.stage.fleet.fallen():
                raise Trouble(f"{member.name} ended by itself; its last words:\n{member.process.tail()}")

    def _feed(self) -> None:
        if not self._feeding:
            return
        due = int((time.monotonic() - self._feed_at) * RATE)
        for job in self._take(due):
            self.submitted.add(job())
        self._feed_at += due / RATE

    def _take(self, count: int) -> Iterator[work.Job]:
        for _ in range(count):
            job = next(self._jobs, None)
            if job is None:
                self._feeding, self.handed_in_all = False, True
                return
            yield job

    def _all_ended(self) -> bool:
        known, ended = score.ask(self.connection, "progress")[0]
        return bool(known == ended)

    def _running_at(self, pid: int) -> set[str]:
        running = recorder.read(self._runs_file).running
        return {job_id for job_id, parent in running.items() if parent == pid}

    def _holds_long(self, pid: int) -> bool:
        return bool(self._running_at(pid) & self.submitted.long)

    def _counter(self, name: str) -> int:
        return dict(score.ask(self.connection, "counters")).get(name, 0)

    @property
    def _runs_file(self) -> Any:
        path = self.stage.settings.runs_file
        assert path is not None
        return path

    @cached_property
    def _redis(self) -> Any:
        import redis

        assert self.stage.redis_url is not None
        return redis.Redis.from_url(self.stage.redis_url)
