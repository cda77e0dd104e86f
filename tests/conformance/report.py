"""What became of the tests of each file, from pytest's JUnit report."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

KINDS = ("passed", "failed", "error", "skipped", "exception", "xfailed")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The counts of one file, the tests that failed, and the reasons of the skipped ones."""

    counts: Counter[str]
    failures: tuple[str, ...] = ()
    skips: tuple[str, ...] = ()
    seconds: float = 0.0


class Report:
    """All files of a run."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, str, str, Outcome]] = []

    def add(self, suite: str, mode: str, file: str, outcome: Outcome) -> None:
        self._rows.append((suite, mode, file, outcome))

    @property
    def failed(self) -> int:
        return sum(outcome.counts["failed"] + outcome.counts["error"] for *_, outcome in self._rows)

    def text(self) -> str:
        """A table, the failures, and one line that sums up."""
        lines = ["", f"{'suite':8}{'mode':9}{'file':48}" + "".join(f"{kind:>10}" for kind in KINDS) + f"{'seconds':>9}"]
        total: Counter[str] = Counter()
        for suite, mode, file, outcome in self._rows:
            total += outcome.counts
            numbers = "".join(f"{outcome.counts[kind]:>10}" for kind in KINDS)
            lines.append(f"{suite:8}{mode:9}{file:48}{numbers}{outcome.seconds:>9.0f}")
        for suite, mode, file, outcome in self._rows:
            lines += [f"FAILED {suite} {mode} {file} {name}" for name in outcome.failures]
        for suite, mode, file, outcome in self._rows:
            lines += [f"skipped {suite} {mode} {file} {reason}" for reason in outcome.skips]
        lines.append(f"{total['passed']} passed, {self.failed} failed, {total['skipped'] + total['exception']} skipped")
        return "\n".join(lines)


def read(xml: Path) -> Outcome:
    """The outcome that pytest has written; a run that wrote none is one error."""
    if not xml.exists():
        return Outcome(Counter(error=1), ("the run itself",))
    counts: Counter[str] = Counter()
    failures: list[str] = []
    skips: Counter[str] = Counter()
    suite = next(ElementTree.parse(xml).getroot().iter("testsuite"))
    for case in suite.iter("testcase"):
        kind, reason = _kind(case)
        counts[kind] += 1
        if kind in ("failed", "error"):
            failures.append(f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}")
        elif reason:
            skips[reason] += 1
    reasons = tuple(f"{number} x {reason}" for reason, number in skips.items())
    return Outcome(counts, tuple(failures), reasons, float(suite.get("time") or 0))


def _kind(case: ElementTree.Element) -> tuple[str, str]:
    for child in case:
        message = re.sub(r"\s+", " ", child.get("message") or "")
        match child.tag:
            case "failure":
                return "failed", message
            case "error":
                return "error", message
            case "skipped" if child.get("type") == "pytest.xfail":
                return "xfailed", message
            case "skipped":
                return ("exception" if message.startswith("exception:") else "skipped"), message
    return "passed", ""
