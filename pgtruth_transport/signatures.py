"""The ids that stand in a canvas: in results that wait for each other, and in signatures yet to be published. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


def ids_before(result: Any) -> Iterator[str]:
    """The ids of a result and of everything before it in its chain."""
    while result is not None:
        yield result.id
        for child in getattr(result, "results", None) or ():
            yield from ids_before(child)
        result = result.parent


def group_members(chain: Iterable[Any]) -> Iterator[str]:
    """The ids of the results that the groups in this chain would have had."""
    for signature in chain:
        if signature.get("subtask_type") == "group":
            yield from _result_ids(signature)


def _result_ids(signature: Any) -> Iterator[str]:
    kwargs = signature.get("kwargs") or {}
    match signature.get("subtask_type"):
        case "group" | "chain":
            for task in kwargs.get("tasks") or ():
                yield from _result_ids(task)
        case "chord":
            yield from _result_ids(kwargs["body"])
        case _:
            task_id = signature.get("options", {}).get("task_id")
            if task_id:
                yield task_id
