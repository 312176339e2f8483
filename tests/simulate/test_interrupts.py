"""Ctrl-C is kept until a block is done, and then is not lost."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from fedjax_pers.simulate.interrupts import between_blocks


@pytest.fixture(autouse=True)
def python_s_own_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_waits_for_a_check_that_then_raises(capsys):
    with pytest.raises(KeyboardInterrupt), between_blocks() as check:
        check()
        interrupt()
        assert "press Ctrl-C again to stop at once" in capsys.readouterr().err
        check()


def test_the_second_acts_at_once():
    with between_blocks():
        interrupt()
        with pytest.raises(KeyboardInterrupt):
            interrupt()


def test_without_one_nothing_is_raised():
    with between_blocks() as check:
        check()


def test_other_threads_and_other_handlers_keep_what_they_have():
    found = []

    def elsewhere():
        with between_blocks() as check:
            check()
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with between_blocks():
        found.append(signal.getsignal(signal.SIGINT))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert found == [signal.default_int_handler, signal.SIG_IGN]
