"""What the demo submits: a few hundred jobs of every kind, in a fixed order."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from celery.result import AsyncResult, ResultBase, ResultSet

from tasks import cleanup, payments, reports, thumbnails, troubles, webhooks

SIZES = (48, 64, 96, 128, 160, 192, 256, 320)
ORDERS = 24
HOPELESS = 4  # jobs that fail in every attempt: they must end failed, once their budget is spent


@dataclass(slots=True)
class Submitted:
    """The ids of everything that was handed in, kept outside the database."""

    ids: set[str] = field(default_factory=set)
    hopeless: set[str] = field(default_factory=set)
    orders: list[str] = field(default_factory=list)  # each must be charged once
    long: set[str] = field(default_factory=set)

    def add(self, result: ResultBase) -> None:
        """Remember a result and, for a chord, its members."""
        if isinstance(result, AsyncResult):
            self.ids.add(result.id)
            if result.parent is not None:
                self.add(result.parent)
        elif isinstance(result, ResultSet):
            for member in result.results:
                self.add(member)


Job = Callable[[], ResultBase]


def long_jobs(count: int, seconds: float) -> list[AsyncResult]:
    """Hand in jobs that are still running when something happens to their worker."""
    return [troubles.slow.delay(seconds) for _ in range(count)]


def jobs(images: Path, output: Path, gateway: str, submitted: Submitted) -> Iterator[Job]:
    """Everything else, mixed; calling one hands it in."""
    sources = sorted(str(path) for path in images.iterdir())
    plan: list[Job] = []
    for number in range(160):
        source, size = sources[number % len(sources)], SIZES[number // len(sources) % len(SIZES)]
        plan.append(lambda s=source, n=size: thumbnails.make_thumbnail.delay(s, str(output / "thumbnails"), n))
    for number in range(8):
        plan.append(lambda n=number: reports.report(f"report-{n}", sources, str(output / "reports")).delay())
    for number in range(60):
        plan.append(lambda n=number: webhooks.send_webhook.delay(f"{gateway}/acts", {"key": f"webhook:{n}"}))
    plan += [lambda n=number: _charge(f"order-{n}", submitted) for number in range(ORDERS)]
    plan += [lambda: troubles.flaky.delay(1)] * 20
    plan += [lambda: troubles.flaky.delay(2)] * 8
    plan += [lambda: troubles.crash.delay(1)] * 4
    plan += [lambda: troubles.slow.delay(0.5)] * 8
    plan += [lambda: cleanup.remove_old_files.delay(str(output), 24.0)] * 4
    plan += [lambda: _hopeless(submitted)] * HOPELESS
    random.Random(2).shuffle(plan)
    yield from plan


def _charge(order: str, submitted: Submitted) -> AsyncResult:
    submitted.orders.append(order)
    return payments.charge_order.delay(order, 1999)


def _hopeless(submitted: Submitted) -> AsyncResult:
    result = troubles.flaky.delay(1_000)
    submitted.hopeless.add(result.id)
    return result
