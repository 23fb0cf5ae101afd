"""A second Ctrl-C forces, whenever it comes, and never leaves a stop half done."""

from __future__ import annotations

import os
import signal
import time

import pytest

from clusterctl.client.interrupt import InterruptGuard


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)


def test_one_that_comes_before_the_request_is_kept_for_it() -> None:
    with InterruptGuard() as guard:
        press()
        with pytest.raises(KeyboardInterrupt), guard.may_force():
            raise AssertionError("the stop that can wait is passed over")
        # While the forced one is under way.
        press()


def test_one_that_comes_while_the_stop_waits_ends_the_waiting_and_the_next_one_nothing() -> None:
    with InterruptGuard() as guard:
        with pytest.raises(KeyboardInterrupt), guard.may_force():
            press()
        press()
    with pytest.raises(KeyboardInterrupt):
        # All is as it was.
        press()


def test_without_one_nothing_is_forced() -> None:
    with InterruptGuard() as guard:
        with guard.may_force():
            pass
        press()
        assert guard.came
