"""Two tables that fit 80 columns: what came of each combination, and what was really installed in it."""

from __future__ import annotations

from tests.matrix.running import PACKAGES, Row


def text(rows: list[Row]) -> str:
    """The tables, the failures, what could not be had, and one line that sums up."""
    ran = [row for row in rows if not row.missing]
    lines = ["", f"{'combination':14}{'Python':8}{'Celery':8}{'kombu':8}{'PostgreSQL':12}"]
    lines[-1] += f"{'passed':>7}{'failed':>7}{'skipped':>8}{'s':>5}"
    for row in ran:
        named = "".join(f"{row.versions.get(name, '?'):8}" for name in ("Python", "celery", "kombu"))
        counts = f"{row.passed:>7}{len(row.failures):>7}{row.skipped:>8}{row.seconds:>5.0f}"
        lines.append(f"{row.name:14}{named}{row.versions.get('PostgreSQL', '?'):12}{counts}")
    lines += [f"{row.name:14}not available: {row.missing}" for row in rows if row.missing]
    lines += [f"{row.name:14}not available: {lack}" for row in rows for lack in row.lacking]
    installed = [row for row in ran if row.versions]
    lines += ["", f"{'installed':17}" + "".join(f"{row.name[:8]:>9}" for row in installed)]
    for name in PACKAGES:
        lines.append(f"{name[:16]:17}" + "".join(f"{row.versions[name][:8]:>9}" for row in installed))
    lines.append("")
    lines += [f"FAILED {row.name} {failure}" for row in ran for failure in row.failures]
    lines += [f"{row.name}: {row.again} passed only when they ran alone" for row in ran if row.again]
    failed = sum(len(row.failures) for row in ran)
    lines.append(f"{sum(r.passed for r in ran)} passed, {failed} failed, {sum(r.skipped for r in ran)} skipped")
    return "\n".join(lines)
