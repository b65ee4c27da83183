from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

from frontier_llm.run.signals import SignalWatcher, held

# Locking a C mutex twice never returns to the interpreter, even after a signal. A rank in a blocked collective does not
# return either.
BLOCKED = """
import ctypes, os, threading, time
from frontier_llm.run.signals import SignalWatcher
with SignalWatcher(debounce_s=0.3) as watcher:
    def tell():
        while watcher.requested is None:
            time.sleep(0.01)
        os.write(1, watcher.requested.encode() + b"\\n")
    threading.Thread(target=tell, daemon=True).start()
    os.write(1, b"ready\\n")
    mutex = ctypes.create_string_buffer(64)
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


def first_of(watcher: SignalWatcher) -> str | None:
    """Return the request as soon as there is one."""
    deadline_s = time.monotonic() + 60.0
    while watcher.requested is None and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return watcher.requested


def test_first_signal_is_remembered_and_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with SignalWatcher(debounce_s=600.0) as watcher:
        assert watcher.requested is None
        os.kill(os.getpid(), signal.SIGUSR1)
        assert first_of(watcher) == "SIGUSR1"
        os.kill(os.getpid(), signal.SIGTERM)  # within the debounce time: the same request
        time.sleep(0.2)
        assert watcher.requested == "SIGUSR1"
    assert signal.getsignal(signal.SIGUSR1) is before


def test_what_comes_before_the_watcher_waits_for_it() -> None:
    main = threading.get_ident()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with held():
        signal.pthread_kill(main, signal.SIGUSR1)
        with SignalWatcher() as watcher:
            assert first_of(watcher) == "SIGUSR1"
        # After the block the signal is held back again, so that it can never kill a rank that is exiting.
        signal.pthread_kill(main, signal.SIGUSR1)
        assert signal.sigwait({signal.SIGUSR1}) == signal.SIGUSR1
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_blocked_main_thread_sees_the_flag_and_the_second_signal_ends_it() -> None:
    with subprocess.Popen([sys.executable, "-c", BLOCKED], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.readline() == b"SIGUSR1\n"
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM


def test_a_terminal_that_closes_is_heard_unless_nohup_says_otherwise() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    try:
        with SignalWatcher() as watcher:
            os.kill(os.getpid(), signal.SIGHUP)
            assert first_of(watcher) == "SIGHUP"
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with SignalWatcher() as watcher:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert first_of(watcher) == "SIGUSR1"
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
