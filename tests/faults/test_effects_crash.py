"""An effect under random crashes, cut connections, frozen attempts and misbehaving recipients (ADR-007).

Whatever happens between any two steps, the recipient has acted at most once per effect and in the order in which calls
began, and the ledger never says less than it knows: applied, unknown, or definitely not. When the trouble is over, the
job ends with the effect applied exactly once.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as profile
from hypothesis import strategies as st

from pgtruth_transport import effects
from pgtruth_transport.attempts import Attempt
from pgtruth_transport.db import Database
from pgtruth_transport.effects import book, flow, reconciling
from pgtruth_transport.effects.kinds import Effect, Kind
from pgtruth_transport.effects.ledger import Ledger
from pgtruth_transport.effects.states import EffectState
from pgtruth_transport.settings import Settings
from tests.support_effects import Recipient, hold, kind_for, let_go

GUARDS = ("lookup", "once", "tombstone", "fence", "tombstone-ordered")
BEHAVIOURS = ("ok", "acts, no answer", "on its way", "refuses", "fails")
#: Guards that turn away the call of an attempt that was frozen, which a bare look-up cannot.
FREEZE_SAFE = frozenset(GUARDS) - {"lookup"}
STEPS = 24  # about as many as an attempt ever has
RUNS = 1000

_numbers = itertools.count(1)
tally: Counter[str] = Counter()


class Crash(BaseException):
    """The process is gone: nothing after this runs, not even its ``except`` blocks' statements."""


@dataclass(slots=True)
class Trouble:
    """Lets a number of steps pass, then makes trouble of one kind; counts the steps."""

    at: int | None = None
    how: str = "crash"  # crash | cut | freeze
    steps: int = 0
    dead: bool = False
    met: bool = False
    frozen: threading.Event = field(default_factory=threading.Event)
    thaw: threading.Event = field(default_factory=threading.Event)

    def step(self, *, database: bool = False) -> None:
        """One boundary between two steps."""
        if self.dead:
            raise Crash
        self.steps += 1
        if self.steps != self.at:
            return
        self.met = True
        if self.how == "crash" or (self.how == "cut" and not database):
            self.dead = True
            raise Crash
        if self.how == "cut":
            raise psycopg.OperationalError("the connection was cut")
        self.frozen.set()
        assert self.thaw.wait(30)


class TroubledLedger(Ledger):
    """A ledger with a boundary before and after every statement."""

    def __init__(self, database: Database, attempt: Attempt, trouble: Trouble) -> None:
        super().__init__(database, attempt, owner="tests")
        self._trouble = trouble

    def _around(self, call: Callable[..., Any], *arguments: Any) -> Any:
        self._trouble.step(database=True)
        given = call(*arguments)
        self._trouble.step(database=True)
        return given

    def _begin(self, *arguments: Any) -> Any:
        return self._around(super()._begin, *arguments)

    def _finish(self, *arguments: Any) -> Any:
        return self._around(super()._finish, *arguments)

    def _refence(self, *arguments: Any) -> Any:
        return self._around(super()._refence, *arguments)

    def _execute(self, *arguments: Any) -> Any:
        return self._around(super()._execute, *arguments)

    def _rows(self, *arguments: Any) -> Any:
        return self._around(super()._rows, *arguments)


@dataclass(frozen=True, slots=True)
class Round:
    """One attempt's fate."""

    which: int = 0  # of two effects on one resource
    behaviour: str = "ok"
    at: int | None = None
    how: str = "crash"
    asking: str = "ok"  # how the recipient answers questions: ok | fails
    beat: bool = False  # afterwards beat reconciles
    later: bool = False  # afterwards time passes: what was on its way arrives


class World:
    """One recipient, one or two effects, and the attempts at them."""

    def __init__(self, conn: psycopg.Connection[Any], settings: Settings, guard: str) -> None:
        self.conn, self.settings, self.database = conn, settings, Database.of(settings)
        self.number = next(_numbers)
        self.guard = guard
        self.recipient = Recipient(guard.partition("-")[0])
        self.asking = "ok"
        self._local = threading.local()
        ordered = guard in ("fence", "tombstone-ordered")
        self.effects = 2 if ordered else 1
        self.kind: Kind = kind_for(self.recipient, f"kind-{self.number}", self._ask, ordered=ordered)
        self.frozen: list[tuple[Trouble, threading.Thread]] = []
        self.met = False  # whether any trouble has come to pass

    def key(self, which: int) -> str:
        return f"effect-{self.number}-{which}"

    def job(self, which: int) -> str:
        return f"job-{self.number}-{which}"

    def play(self, round_: Round) -> str:
        """One attempt, and what comes after it."""
        trouble = Trouble(round_.at, round_.how)
        self.asking = round_.asking
        which = round_.which % self.effects
        attempt = hold(self.conn, self.settings, self.job(which))
        if round_.how == "freeze" and round_.at is not None:
            said = self._in_a_thread(which, attempt, round_.behaviour, trouble)
        else:
            said = self._attempt(which, attempt, round_.behaviour, trouble)
        tally[said] += 1
        self.met |= trouble.met
        if said != "frozen":
            let_go(self.conn, self.job(which))
        if round_.later:
            self.time_passes()
        if round_.beat:
            self.conn.execute("UPDATE pgtruth.effects SET next_check_at = clock_timestamp() WHERE state = 'unknown'")
            reconciling.reconcile_due(self.settings)
        self.check()
        return said

    def _attempt(self, which: int, attempt: Attempt, behaviour: str, trouble: Trouble) -> str:
        self._local.trouble = trouble
        request = self.kind.request(self.key(which), {"order": self.number, "amount": which})
        ledger = TroubledLedger(self.database, attempt, trouble)
        try:
            receipt = flow.run(self.kind, request, lambda effect: self._call(effect, behaviour, trouble), ledger)
        except Crash:
            return "crashed"
        except psycopg.OperationalError:
            return "database error before the call"
        except effects.EffectError as exc:
            return type(exc).__name__
        finally:
            self._local.trouble = None
        assert receipt == {"receipt": self.key(which)}
        return "returned"

    def _in_a_thread(self, which: int, attempt: Attempt, behaviour: str, trouble: Trouble) -> str:
        said: list[str] = []

        def run() -> None:
            said.append(self._attempt(which, attempt, behaviour, trouble))
            trouble.frozen.set()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert trouble.frozen.wait(30)
        if said:
            thread.join()
            return said[0]
        self.frozen.append((trouble, thread))
        return "frozen"

    def _call(self, effect: Effect, behaviour: str, trouble: Trouble) -> Any:
        trouble.step()
        match behaviour:
            case "refuses":
                raise effects.NoEffect("declined")
            case "fails":
                raise ConnectionRefusedError("nobody there")
            case "on its way":
                self.recipient.in_flight.append(effect)
                trouble.step()
                raise TimeoutError("no answer")
        receipt = self.recipient.receive(effect)
        trouble.step()
        if behaviour == "acts, no answer":
            raise TimeoutError("no answer")
        return receipt

    def _ask(self, question: Callable[[Effect], Any], effect: Effect) -> Any:
        trouble = getattr(self._local, "trouble", None)
        if trouble is not None:
            trouble.step()
        if self.asking == "fails":
            raise ConnectionRefusedError("nobody there")
        answer = question(effect)
        if trouble is not None:
            trouble.step()
        return answer

    def time_passes(self) -> None:
        """More of it than a request can be under way."""
        self.recipient.deliver()
        self.conn.execute(
            "UPDATE pgtruth.effects SET unknown_since = unknown_since - interval '2 hours' WHERE state = 'unknown'"
        )

    def wake_frozen(self) -> None:
        """Frozen attempts go on, long after their leases are gone."""
        for trouble, thread in self.frozen:
            trouble.thaw.set()
            thread.join(30)
            assert not thread.is_alive()
        self.frozen = []

    def settle(self) -> None:
        """The trouble is over: every job runs until it is done. Leases of frozen attempts have run out by now."""
        for which in range(self.effects):
            let_go(self.conn, self.job(which))
        for which in range(self.effects):
            for _ in range(12):
                if self.play(Round(which=which, later=True)) == "returned":
                    break
            else:
                raise AssertionError(f"effect {which} never ended: {self.history()}")

    def check(self) -> None:
        """What holds at every moment."""
        for which in range(self.effects):
            key = self.key(which)
            count = self.recipient.count(key)
            assert count <= 1, f"acted {count} times: {self.history()}"
            state = self.state(key)
            if count:
                assert state in ("started", "unknown", "applied"), f"silence about {key}: {self.history()}"
            if state == "applied":
                assert count == 1, f"applied and not done: {self.history()}"
        self._check_order()

    def _check_order(self) -> None:
        """The recipient acted in the order in which the calls began."""
        if self.effects == 1:
            return
        begun = [(key, calls) for key, calls, _from, to in self.history() if to == "started"]
        places = [begun.index(act) for act in self.recipient.acts]
        assert places == sorted(places), f"overtaken: {self.recipient.acts} of {begun}"

    def check_history(self) -> None:
        """One row per move, each from where the one before ended; applied once."""
        last: dict[str, str | None] = {}
        for key, _calls, before, after in self.history():
            assert last.get(key) == before, self.history()
            last[key] = after
        for which in range(self.effects):
            moves = [row for row in self.history() if row[0] == self.key(which) and row[2] != row[3]]
            assert sum(1 for row in moves if row[3] == "applied") <= 1

    def state(self, key: str) -> str | None:
        row = self.conn.execute("SELECT state FROM pgtruth.effects WHERE key = %s", (key,)).fetchone()
        return None if row is None else row[0]

    def history(self) -> list[tuple[str, int, str | None, str]]:
        return self.conn.execute(
            "SELECT key, calls, from_state, to_state FROM pgtruth.effect_history WHERE key = ANY (%s) ORDER BY id",
            ([self.key(which) for which in range(self.effects)],),
        ).fetchall()


def run(world: World, rounds: list[Round], *, frozen_wake_last: bool) -> None:
    """Play the rounds, then let everything end, and look at what came of it."""
    try:
        for round_ in rounds:
            world.play(round_)
        if not frozen_wake_last:
            world.wake_frozen()
            world.check()
        world.settle()
    finally:
        world.wake_frozen()
    world.recipient.deliver()
    world.check()
    world.check_history()
    for which in range(world.effects):
        assert world.recipient.count(world.key(which)) == 1
        assert world.state(world.key(which)) == "applied"
    tally["runs"] += 1


@st.composite
def stories(draw: st.DrawFn) -> tuple[str, list[Round], bool]:
    """A recipient and up to five attempts with their troubles."""
    guard = draw(st.sampled_from(GUARDS))
    rounds = draw(
        st.lists(
            st.builds(
                Round,
                which=st.integers(0, 1),
                behaviour=st.sampled_from(BEHAVIOURS),
                at=st.none() | st.integers(1, STEPS),
                how=st.sampled_from(("crash", "cut", "freeze") if guard in FREEZE_SAFE else ("crash", "cut")),
                asking=st.sampled_from(("ok", "fails")),
                beat=st.booleans(),
                later=st.booleans(),
            ),
            min_size=1,
            max_size=5,
        )
    )
    return guard, rounds, draw(st.booleans())


@pytest.mark.timeout(600)
@profile(
    max_examples=RUNS,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate, Phase.shrink),
)
@given(story=stories())
def test_random_troubles_one_effect_or_a_reconciled_unknown(
    conn: psycopg.Connection[Any], settings: Settings, story: tuple[str, list[Round], bool]
) -> None:
    guard, rounds, frozen_wake_last = story
    run(World(conn, settings, guard), rounds, frozen_wake_last=frozen_wake_last)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("guard", GUARDS)
def test_a_crash_or_a_cut_between_every_two_steps(
    conn: psycopg.Connection[Any], settings: Settings, guard: str
) -> None:
    """Exhaustively: every step of the first attempt, then the same step of the attempt that comes after it."""
    hows = ("crash", "cut", "freeze") if guard in FREEZE_SAFE else ("crash", "cut")
    for behaviour, how in itertools.product(BEHAVIOURS, hows):
        for at in itertools.count(1):
            world = World(conn, settings, guard)
            round_ = Round(behaviour=behaviour, at=at, how=how, later=True)
            run(world, [round_, round_], frozen_wake_last=at % 2 == 0)
            if not world.met:
                assert at > 4  # neither attempt has so many steps: all have been tried
                break


@pytest.mark.parametrize("behaviour", ["ok", "acts, no answer", "fails"])
def test_what_can_never_be_asked_about_is_one_listed_unknown(
    conn: psycopg.Connection[Any], settings: Settings, behaviour: str
) -> None:
    """Never silence: the job ends with that reason, the recipient has acted once at most, the effect is listed."""
    for at in itertools.count(1):
        world = World(conn, settings, "lookup")
        world.play(Round(behaviour=behaviour, at=at, asking="fails"))
        again = Round(behaviour="ok", asking="fails", beat=True)
        said = [world.play(again) for _ in range(3)][-1]
        if world.state(world.key(0)) == "applied":
            assert said == "returned"
        else:
            conn.execute("UPDATE pgtruth.effects SET unknown_since = unknown_since - interval '2 days'")
            assert world.play(again) == "EffectGivenUp"
            assert world.key(0) in {row.key for row in book.listed(world.database, [EffectState.UNKNOWN])}
        assert world.recipient.count(world.key(0)) <= 1
        world.check_history()
        if not world.met:
            break


@pytest.mark.timeout(300)
def test_a_thousand_times_two_attempts_begin_at_the_same_instant(
    conn: psycopg.Connection[Any], settings: Settings
) -> None:
    """E06: both hold good leases, of two jobs; exactly one calls. Every other time a fresh call is wanted."""
    database = Database.of(settings)
    kind = effects.declare("same-instant", fields=("n",), in_flight=0)
    attempts = [hold(conn, settings, f"job-{name}", seconds=600) for name in "ab"]
    ends: Counter[str] = Counter()
    for number in range(1000):
        key = f"instant-{number}"
        request = kind.request(key, {"n": number})
        if number % 2:
            with pytest.raises(effects.NoEffect):
                flow.run(kind, request, _declines, Ledger(database, attempts[0], owner="t"))
        calls: list[int] = []
        barrier = threading.Barrier(2)

        def attempt(
            held: Attempt, request: Any = request, calls: list[int] = calls, barrier: threading.Barrier = barrier
        ) -> None:
            ledger = Ledger(database, held, owner="t")
            barrier.wait(10)
            try:
                flow.run(kind, request, lambda effect: calls.append(effect.number), ledger)
                ends["returned"] += 1
            except effects.EffectUnknown:
                ends["waits"] += 1

        threads = [threading.Thread(target=attempt, args=(held,)) for held in attempts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(calls) == 1, f"round {number}: {calls}"
    assert ends["returned"] >= 1000
    assert ends["returned"] + ends["waits"] == 2000
    applied = conn.execute("SELECT count(*) FROM pgtruth.effects WHERE state = 'applied'").fetchone()
    assert applied == (1000,)


def _declines(effect: Effect) -> None:
    raise effects.NoEffect("declined")


def teardown_module() -> None:
    """Show what the runs met (with ``-s``)."""
    print("\neffects under trouble:", dict(tally.most_common()))
