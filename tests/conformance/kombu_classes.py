"""kombu's common integration classes, instantiated for ``pgtruth://``; copied beside them before it runs."""

from __future__ import annotations

import os

import kombu
import pytest

from .common import (
    BaseEventLoop,
    BaseExchangeTypes,
    BaseFailover,
    BaseMessage,
    BasePriority,
    BaseTimeToLive,
    BasicFunctionality,
)

URL = os.environ["TEST_BROKER"]
OPTIONS = {"signal_url": os.environ.get("TEST_SIGNAL") or None}
DEAD = "pgtruth://nobody@127.0.0.1:1/nowhere"


@pytest.fixture
def connection():
    return kombu.Connection(URL, transport_options=dict(OPTIONS))


@pytest.fixture
def invalid_connection():
    return kombu.Connection(DEAD, transport_options={"max_retries": 1})


@pytest.fixture
def failover_connection():
    # the port stands beside the URL as well: kombu leaves the URL of this transport whole until the first failover
    return kombu.Connection(f"{DEAD};{URL}", port=1, transport_options=dict(OPTIONS))


class test_basic_functionality(BasicFunctionality):
    pass


class test_exchange_types(BaseExchangeTypes):
    pass


class test_time_to_live(BaseTimeToLive):
    pass


class test_priority(BasePriority):
    PRIORITY_ORDER = "asc"


class test_message(BaseMessage):
    pass


class test_event_loop(BaseEventLoop):
    pass


class test_failover(BaseFailover):
    pass
