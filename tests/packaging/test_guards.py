"""The guards over all tests, tried on a small suite: leaks fail and are named, signals are heard,
and processes that share the work tell what they saw."""

from __future__ import annotations

import signal

import pytest

from project import TESTS

# Each runs pytest in a child, with processes of its own.
pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

HEARD = (signal.SIGINT, signal.SIGHUP)

LEAKS = """
    import _thread, os, pytest, signal, socket, subprocess, sys, threading

    pytestmark = pytest.mark.process
    kept = []

    def test_leaks_thread():
        threading.Thread(target=threading.Event().wait, name="left", daemon=True).start()

    def test_leaks_file(tmp_path):
        kept.append(open(tmp_path / "left", "w"))

    def test_leaks_socket():
        kept.append(socket.socket())

    def test_leaks_child():
        kept.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))

    @pytest.mark.fresh
    def test_leaks_child_that_is_not_forked():
        kept.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))

    def test_leaks_child_that_has_ended():
        pid = os.posix_spawn("/bin/true", ["true"], {})
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    def test_joins_thread():
        thread = threading.Thread(target=len, args=("",))
        thread.start()
        thread.join()

    def test_has_thread_that_is_about_to_end():
        done = threading.Event()
        threading.Thread(target=done.wait).start()
        done.set()

    def test_closes_file(tmp_path):
        with open(tmp_path / "closed", "w"): pass

    def test_has_file_that_only_garbage_holds(tmp_path):
        cycle = [os.memfd_create("garbage")]
        class Closer:
            def __del__(self, close=os.close, fd=cycle[0]): close(fd)
        cycle += [cycle, Closer()]

    def test_has_file_that_a_thread_of_a_library_is_about_to_close():
        fd = os.memfd_create("closed late")
        # No thread of Python's that could be joined.
        _thread.start_new_thread(lambda: threading.Event().wait(0.05) or os.close(fd), ())

    def test_waits_for_child():
        subprocess.run([sys.executable, "-c", ""], check=True)

    @pytest.fixture(scope="module")
    def server():
        done = threading.Event()
        thread = threading.Thread(target=done.wait)
        thread.start()
        yield
        done.set()
        thread.join()

    def test_uses_what_a_wider_fixture_holds(server): pass
    def test_uses_it_again(server): pass

    def test_fails_and_is_not_blamed_twice(tmp_path):
        kept.append(open(tmp_path / "left", "w"))
        assert not kept

    def test_has_a_child_that_hears_signals():
        for number in signal.SIGINT, signal.SIGHUP:
            code = f"import os; os.kill(os.getpid(), {number}); print('not heard')"
            done = subprocess.run([sys.executable, "-c", code], capture_output=True)
            assert (done.returncode, done.stdout) == (-number, b"")
"""


@pytest.fixture(autouse=True)
def conftest(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """This project's, for what `pytester` runs."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.delenv("FEEDER_MAX_SKIPS", raising=False)
    pytester.makepyprojecttoml(
        "[tool.pytest.ini_options]\n"
        "addopts = ['-p', 'no:cacheprovider']\n"
        "markers = ['process', 'fresh']\n"
    )
    pytester.makeconftest(
        f"{(TESTS / 'conftest.py').read_text()}\nimport leaks; leaks.JOIN_S = 2.0"
    )


def test_leaks_fail_and_are_named_and_nothing_else_is(pytester: pytest.Pytester) -> None:
    """Also where the shell has children ignore signals, as in the background or under nohup."""
    ignored = {number: signal.signal(number, signal.SIG_IGN) for number in HEARD}
    try:
        result = pytester.runpytest_subprocess(pytester.makepyfile(LEAKS))
    finally:
        for number, heard in ignored.items():
            signal.signal(number, heard)
    result.assert_outcomes(passed=15, errors=6, failed=1)
    what = ("thread 'left'", "file descriptor of */left", "file descriptor of socket:*")
    what += ("*child process * (python)",) * 2 + ("child process * (true)",)
    result.stdout.fnmatch_lines([f"the test left behind: {one}*" for one in what])
    wrong = [line for line in result.outlines if "ERROR at teardown of" in line]
    assert len([line for line in wrong if " test_leaks_" in line]) == len(wrong) == 6


def test_processes_that_share_the_work_tell_what_they_saw(pytester: pytest.Pytester) -> None:
    """A skip is counted once, what one leaves that dies is run, what UTF-8 cannot hold comes."""
    pytester.makepyfile(
        test_a="from needs import needs\nneeds('no_such_tool')",
        test_b="from needs import needs\ndef test_call(): needs('no_such_package')",
        test_c="""
            import logging
            def test_logs(): logging.getLogger().warning("bad file caf\\udce9.jpg")
            def test_fails(): assert "caf\\udce9.jpg" == ""
            """,
        test_d="import os\ndef test_dies(): os._exit(3)\ndef test_goes_on(): pass",
        test_e="def test_goes_on_too(): pass",
    )
    result = pytester.runpytest_subprocess("-n", "2", "--max-skips=0")
    result.assert_outcomes(passed=3, failed=2, skipped=2)
    result.stdout.fnmatch_lines(
        [
            "skipped for missing tools or packages: 2 (no_such_package, no_such_tool)",
            "failed: 2 skipped, where at most 0 may be",
        ]
    )
    crashed = [line for line in result.outlines if "crashed while running" in line]
    assert crashed and all("test_dies" in line for line in crashed)
    assert result.ret != pytest.ExitCode.OK
