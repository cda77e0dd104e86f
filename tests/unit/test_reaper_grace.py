"""When an expired lease means a dead owner, and when it only means that nobody could renew."""

from __future__ import annotations

import pytest

from pgtruth_transport.reaper import may_reap


@pytest.mark.parametrize(
    ("settled_for", "last_ran", "expected"),
    [
        (1000, 5, True),
        (1000, None, True),  # the first sweep of all
        (1000, 15, True),
        (1000, 16, False),  # nobody has swept for more than a lease: nobody could write, or nobody was there
        (14, 5, False),  # the server has just started, or has just been promoted
        (15, 5, True),
        (14, None, False),
    ],
)
def test_owners_get_the_time_to_renew_first(settled_for: float, last_ran: float | None, expected: bool) -> None:
    assert may_reap(settled_for, last_ran, 15) is expected
