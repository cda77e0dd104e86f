"""Run the matrix: ``python -m tests.matrix [--work FOLDER] [--jobs N] [combination …] [-- pytest's options]``.

Each combination gets a virtual environment of its own and runs the core of the suite on the PostgreSQL that it names.
What this machine cannot have is listed as not available, never as passed. The exit code is 1 if a test failed or if
nothing could be run.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from tests.matrix import report, running
from tests.matrix.combinations import combinations


def main(arguments: list[str]) -> int:
    """Run what was asked for, one combination at a time."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    known = {combination.name: combination for combination in combinations()}
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("--work", type=Path, help="a folder that keeps the environments, reports and logs")
    parser.add_argument("--jobs", default="2", help="tests side by side")
    parser.add_argument("names", nargs="*", metavar="combination", help=f"{', '.join(known)}, base; all without any")
    options = parser.parse_args(arguments[:at])
    names = options.names or [*known, "base"]
    if unknown := set(names) - {*known, "base"}:
        parser.error(f"there is no combination {', '.join(sorted(unknown))}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that what it started ends as well
    rows = []
    with tempfile.TemporaryDirectory(prefix="pgtruth-matrix-") as scratch:
        work = (options.work or Path(scratch)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        work.chmod(0o755)  # PostgreSQL does not run as root, and its user has to reach its files
        for name in names:
            print(f"== {name}", flush=True)
            if name == "base":
                rows.append(running.run_base(work))
            else:
                rows.append(running.run(known[name], work, options.jobs, arguments[at + 1 :]))
            print(report.text(rows[-1:]), flush=True)
    print(report.text(rows))
    return 1 if any(row.failures for row in rows) or not any(row.passed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
