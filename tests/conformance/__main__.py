"""Run the suites: ``python -m tests.conformance [--suite celery|kombu|smoke] [--mode …] [file …] [-- …]``.

``celery`` and ``kombu`` are their ``t/integration``; ``smoke`` is Celery's ``t/smoke``, which takes an hour and so has
to be named. Each file runs in its own process, against a fresh database of an embedded server; each test of ``smoke``
starts servers and workers of its own, as local processes. ``--mode`` is ``notify`` or ``redis``, both without any, or
``control``, which runs Celery's files on ``redis://`` instead, to compare. What stands after ``--`` goes to pytest. The
exit code is 1 if a test failed.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from pgtruth_transport.testing.servers import postgres_server, redis_server

from . import sources
from .report import Report
from .running import MODES, Bench, exceptions
from .suites import SUITES


def main(arguments: list[str]) -> int:
    """Fetch, run, report."""
    options, extra = _parsed(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that what it started ends as well
    report = Report()
    with tempfile.TemporaryDirectory(prefix="pgtruth-conformance-") as scratch:
        archives = Path(options.archives or scratch)
        archives.mkdir(parents=True, exist_ok=True)
        with postgres_server() as postgres, redis_server() as own, redis_server() as waking:
            bench = Bench(Path(scratch), postgres, own, waking, options.timeout, extra)
            for suite in (SUITES[name] for name in options.suite):
                root = sources.unpacked(suite.project, archives, Path(scratch))
                for mode in options.mode:
                    for file in bench.files(suite, root, options.files):
                        print(f"== {suite.name} {mode} {file}", flush=True)
                        report.add(suite.name, mode, file, bench.run(suite, root, mode, file))
    print(report.text())
    print("\nExceptions:")
    for suite in options.suite:
        for test, reason in exceptions(suite).items():
            print(f"  {suite}: {test}: {reason}")
    return 1 if report.failed else 0


def _parsed(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--suite", action="append", choices=tuple(SUITES))
    parser.add_argument("--mode", action="append", choices=MODES)
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one test")
    parser.add_argument("--archives", help="a folder that keeps the source archives for the next run")
    parser.add_argument("files", nargs="*", help="files of the suite's folder; all that concern us without any")
    options = parser.parse_args(arguments[:at])
    options.suite = options.suite or ["celery", "kombu"]
    options.mode = options.mode or ["notify", "redis"]
    return options, arguments[at + 1 :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
