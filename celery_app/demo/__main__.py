"""``python -m celery_app.demo [up]``; ``SIGNAL=redis`` (default) or ``SIGNAL=notify``."""

from __future__ import annotations

import os
import signal
import sys
import time
from types import FrameType

import psycopg

from celery_app import recorder
from celery_app.app import make_app
from celery_app.demo import payments, score
from celery_app.demo.screen import Screen
from celery_app.demo.stage import MODES, Stage, Trouble, set_up
from celery_app.demo.story import Story


def main(arguments: list[str]) -> int:
    """0: all is well; 1: a job was lost, doubled, broken or late, or a process fell over; 2: wrong usage."""
    mode = os.environ.get("SIGNAL", "redis")
    if mode not in MODES or arguments not in ([], ["up"]):
        print("usage: [SIGNAL=redis|notify] python -m celery_app.demo [up]", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    try:
        with Screen() as screen:
            return up(mode, screen) if arguments else demo(mode, screen)
    except Trouble as trouble:
        print(f"\nThe demo failed: {trouble}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def demo(mode: str, screen: Screen) -> int:
    """The whole story, judged."""
    with set_up(mode, screen) as stage, psycopg.connect(stage.dsn, autocommit=True) as connection:
        use_app(stage)
        story = Story(stage, screen, connection)
        story.run()
        figures = score.read(connection, story.victims)
        runs = recorder.read(stage.settings.runs_file or stage.folder)
        charges = payments.read(stage.gateway, story.submitted.orders)
        verdict = score.judge(figures, runs, story.submitted, charges)
        screen.final(mode, figures, runs, charges, verdict)
        stage.keep = not verdict.well
    return 0 if verdict.well else 1


def up(mode: str, screen: Screen) -> int:
    """Keep everything running until Ctrl-C."""
    with set_up(mode, screen) as stage:
        screen.say(f"Flower: {stage.flower}")
        screen.say("to send jobs from another terminal:")
        for name in ("BROKER_URL", "RESULT_BACKEND", "SIGNAL_URL", "OUTPUT_DIR", "GATEWAY_URL"):
            screen.console.print(f"         export {name}='{stage.env[name]}'", soft_wrap=True, markup=False)
        screen.say("Ctrl-C ends everything")
        while not stage.fleet.fallen():
            time.sleep(0.5)
        fallen = stage.fleet.fallen()[0]
        raise Trouble(f"{fallen.name} ended by itself; its last words:\n{fallen.process.tail()}")


def use_app(stage: Stage) -> None:
    """Make an application for the stage's servers the one that ``delay()`` publishes through."""
    app = make_app(stage.settings)
    app.set_current()
    app.set_default()
    app.loader.import_default_modules()


def _leave(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
