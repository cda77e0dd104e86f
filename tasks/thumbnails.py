"""Thumbnails of image files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TypedDict

from celery import shared_task
from PIL import Image


class Thumbnail(TypedDict):
    """What a thumbnail task returns."""

    path: str
    width: int
    height: int
    bytes: int


@shared_task
def make_thumbnail(source: str, folder: str, size: int = 128) -> Thumbnail:
    """Write a JPEG of ``source`` that fits ``size`` by ``size`` pixels into ``folder``.

    The name depends on source and size only and the file appears whole, so running twice leaves one right file.
    """
    target = Path(folder) / thumbnail_name(source, size)
    with Image.open(source) as image:
        small = image.convert("RGB")
        small.thumbnail((size, size))
        _save_whole(small, target)
    return Thumbnail(path=str(target), width=small.width, height=small.height, bytes=target.stat().st_size)


def thumbnail_name(source: str, size: int) -> str:
    """The file name of a thumbnail: ``harbour.png`` at 128 pixels is ``harbour-128.jpg``."""
    return f"{Path(source).stem}-{size}.jpg"


def _save_whole(image: Image.Image, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=".new-")
    try:
        with os.fdopen(handle, "wb") as file:
            image.save(file, "JPEG", quality=85)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
