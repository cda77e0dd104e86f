"""A report as a chord: measure every image side by side, then write one summary."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TypedDict

from celery import chord, shared_task
from celery.canvas import Signature
from PIL import Image, ImageStat

SUFFIXES = {".png", ".jpg", ".jpeg", ".gif", ".webp"}


class Measure(TypedDict):
    """What is known of one image."""

    name: str
    width: int
    height: int
    brightness: float


class Summary(TypedDict):
    """What a report says."""

    name: str
    images: int
    pixels: int
    brightest: str


def report(name: str, images: Iterable[str], folder: str) -> Signature:
    """The whole report, ready for ``delay()``: one member per image, then the summary."""
    return chord([measure_image.s(image) for image in images], write_summary.s(name, folder))


@shared_task(ignore_result=True)
def start_report(images: str, folder: str, name: str = "nightly") -> None:
    """Start a report on every image file of a folder (what beat runs each night)."""
    found = sorted(str(path) for path in Path(images).iterdir() if path.suffix.lower() in SUFFIXES)
    if found:
        report(name, found, folder).delay()


@shared_task
def measure_image(source: str) -> Measure:
    """Size and mean brightness (0 to 255) of one image."""
    with Image.open(source) as image:
        brightness = ImageStat.Stat(image.convert("L")).mean[0]
        return Measure(name=Path(source).name, width=image.width, height=image.height, brightness=round(brightness, 2))


@shared_task
def write_summary(measures: list[Measure], name: str, folder: str) -> Summary:
    """Write ``<folder>/<name>.json`` from all measures; the file appears whole."""
    summary = summarise(name, measures)
    target = Path(folder) / f"{name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    fresh.write_text(json.dumps({"summary": summary, "images": measures}, indent=2))
    os.replace(fresh, target)
    return summary


def summarise(name: str, measures: list[Measure]) -> Summary:
    """The summary of some measures (pure)."""
    brightest = max(measures, key=lambda measure: measure["brightness"], default=None)
    return Summary(
        name=name,
        images=len(measures),
        pixels=sum(measure["width"] * measure["height"] for measure in measures),
        brightest=brightest["name"] if brightest else "",
    )
