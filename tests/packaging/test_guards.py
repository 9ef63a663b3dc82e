"""The guards over all tests, tried on small suites: leaks fail, missing tools are counted."""

from __future__ import annotations

import signal
import textwrap
from pathlib import Path

import pytest

# Each runs pytest in a child, with processes of its own.
pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

TESTS = Path(__file__).parents[1]
HEARD = (signal.SIGINT, signal.SIGHUP)


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Return a function that runs a test file under this project's conftest, in a child process."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.delenv("FEEDER_MAX_SKIPS", raising=False)
    pytester.makeconftest((TESTS / "conftest.py").read_text())

    def run_file(source: str, *arguments: str) -> pytest.RunResult:
        path = pytester.makepyfile(source)
        return pytester.runpytest_subprocess(path, "-p", "no:cacheprovider", *arguments)

    return run_file


LEAKS = {
    "thread": (
        """
        import threading
        def test_leaks():
            threading.Thread(target=threading.Event().wait, name="left", daemon=True).start()
        """,
        "*thread 'left'*",
    ),
    "file": (
        """
        kept = []
        def test_leaks(tmp_path):
            kept.append(open(tmp_path / "left", "w"))
        """,
        "*file descriptor of */left*",
    ),
    "socket": (
        """
        import socket
        kept = []
        def test_leaks():
            kept.append(socket.socket())
        """,
        "*file descriptor of socket:*",
    ),
    "child": (
        """
        import subprocess, sys
        kept = []
        def test_leaks():
            kept.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        """,
        "*child process *",
    ),
    "child that has ended": (
        """
        import os
        def test_leaks():
            pid = os.posix_spawn("/bin/true", ["true"], {})
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        """,
        "*child process * (true)*",
    ),
}


@pytest.mark.parametrize(("source", "line"), LEAKS.values(), ids=LEAKS)
def test_a_leak_fails_and_is_named(run, source: str, line: str) -> None:
    result = run(source)
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines([f"the test left behind: {line}"])


def test_only_the_test_that_leaks_fails(run) -> None:
    result = run(
        """
        kept = []
        def test_first(): pass
        def test_leaks(tmp_path): kept.append(open(tmp_path / "left", "w"))
        def test_last(): pass
        """
    )
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_leaks*"])


def test_what_is_put_back_is_no_leak(run) -> None:
    result = run(
        """
        import _thread, os, subprocess, sys, threading

        def test_joined_thread():
            thread = threading.Thread(target=len, args=("",))
            thread.start()
            thread.join()

        def test_thread_that_is_about_to_end():
            done = threading.Event()
            threading.Thread(target=done.wait).start()
            done.set()

        def test_closed_file(tmp_path):
            with open(tmp_path / "closed", "w"): pass

        def test_file_that_only_garbage_holds(tmp_path):
            cycle = [os.memfd_create("garbage")]
            class Closer:
                def __del__(self, close=os.close, fd=cycle[0]): close(fd)
            cycle += [cycle, Closer()]

        def test_file_that_a_thread_of_a_library_is_about_to_close():
            fd = os.memfd_create("closed late")
            # No thread of Python's that could be joined.
            _thread.start_new_thread(lambda: threading.Event().wait(0.05) or os.close(fd), ())

        def test_child_that_was_waited_for():
            subprocess.run([sys.executable, "-c", ""], check=True)
        """
    )
    result.assert_outcomes(passed=6)


def test_a_wider_fixture_may_hold_things(run) -> None:
    result = run(
        """
        import pytest, threading

        @pytest.fixture(scope="module")
        def server():
            done = threading.Event()
            thread = threading.Thread(target=done.wait)
            thread.start()
            yield
            done.set()
            thread.join()

        def test_one(server): pass
        def test_two(server): pass
        """
    )
    result.assert_outcomes(passed=2)


def test_a_failed_test_is_not_blamed_twice(run) -> None:
    result = run(
        """
        def test_fails(tmp_path):
            file = open(tmp_path / "left", "w")
            assert not file
        """
    )
    result.assert_outcomes(failed=1)


def test_signals_that_the_shell_ignores_are_heard(run) -> None:
    """As those that a shell starts in the background, or under nohup, inherit it."""
    ignored = {number: signal.signal(number, signal.SIG_IGN) for number in HEARD}
    try:
        result = run(
            """
            import signal, subprocess, sys

            def test_a_child_hears_them():
                for number in signal.SIGINT, signal.SIGHUP:
                    code = f"import os; os.kill(os.getpid(), {number}); print('not heard')"
                    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
                    assert (done.returncode, done.stdout) == (-number, b"")
            """
        )
    finally:
        for number, heard in ignored.items():
            signal.signal(number, heard)
    result.assert_outcomes(passed=1)


NEEDY = """
    import pytest
    from needs import needs

    @pytest.mark.needs("pytest", "sh")
    def test_nothing_is_missing(): pass

    @pytest.mark.needs("sh", "no_such_tool")
    def test_mark(): pass

    def test_call(): needs("no_such_package")

    @pytest.mark.needs("no_such_tool")
    def test_the_same_once_more(): pass
"""


def test_missing_tools_are_counted_and_named(run) -> None:
    result = run(NEEDY)
    result.assert_outcomes(passed=1, skipped=3)
    result.stdout.fnmatch_lines(
        ["skipped for missing tools or packages: 3 (no_such_package, no_such_tool)"]
    )
    assert result.ret == pytest.ExitCode.OK


def test_a_whole_file_can_be_skipped(run) -> None:
    result = run("from needs import needs\nneeds('no_such_tool')\nimport no_such_tool")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["skipped for missing tools or packages: 1 (no_such_tool)"])


def test_what_is_skipped_is_counted_once_however_many_processes_share_the_work(run) -> None:
    for source, names in (
        (NEEDY, "3 (no_such_package, no_such_tool)"),
        ("from needs import needs\nneeds('no_such_tool')", "1 (no_such_tool)"),
    ):
        result = run(source, "-n", "2", "--max-skips=0")
        result.stdout.fnmatch_lines([f"skipped for missing tools or packages: {names}"])
        result.stdout.fnmatch_lines([f"failed: {names[0]} skipped, where at most 0 may be"])
        assert result.ret != pytest.ExitCode.OK


def test_what_is_left_is_run_where_a_test_ends_its_process(run, pytester: pytest.Pytester) -> None:
    dies = """
        import os
        def test_dies(): os._exit(3)
        def test_goes_on(): pass
        """
    pytester.makepyfile(test_z_dies=dies, test_z_last="def test_goes_on_too(): pass")
    result = run("def test_is_done(): pass", "-n", "1", "test_z_dies.py", "test_z_last.py")
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(["*crashed while running*test_dies*"])


def test_a_text_that_utf8_cannot_hold_is_reported_by_another_process_too(run) -> None:
    result = run(
        """
        import logging
        def test_logs(): logging.getLogger().warning("bad file caf\\udce9.jpg")
        def test_fails(): assert "caf\\udce9.jpg" == ""
        """,
        "-n", "1",
    )  # fmt: skip
    result.assert_outcomes(passed=1, failed=1)


def test_nothing_missing_is_said_too(run) -> None:
    result = run("def test_passes(): pass")
    result.stdout.fnmatch_lines(["skipped for missing tools or packages: 0 (none)"])


def test_a_folder_is_no_package(run, pytester: pytest.Pytester) -> None:
    pytester.mkdir("no_such_tool")
    run(NEEDY).assert_outcomes(passed=1, skipped=3)


@pytest.mark.parametrize(("limit", "status"), [("3", 0), ("2", 1), ("0", 1)])
def test_more_skips_than_allowed_fail_the_run(run, limit: str, status: int) -> None:
    result = run(NEEDY, "--max-skips", limit)
    assert result.ret == status
    assert ("failed: 3 skipped" in result.stdout.str()) == bool(status)


def test_the_limit_may_come_from_the_environment(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEEDER_MAX_SKIPS", "0")
    result = run(NEEDY)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["failed: 3 skipped, where at most 0 may be"])


def test_no_other_skip_escapes_the_limit(run) -> None:
    result = run(
        """
        import pytest
        def test_skips(): pytest.skip("too hot today")
        @pytest.mark.xfail(strict=True)
        def test_fails_as_expected(): assert False
        """,
        "--max-skips=0",
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["skipped for other reasons: 1 (too hot today)"])


GPUS = """
    import needs

    needs.why_no_gpus = lambda num: "the driver is missing" if num else ""

    def test_needs_one(): needs.needs_gpus(1)
    def test_needs_two(): needs.needs_gpus(2)
    def test_needs_none(): needs.needs_gpus(0)
"""


@pytest.fixture
def run_gpu_tests(run, pytester: pytest.Pytester):
    """Return a function that runs a test file of the folder of GPU tests."""

    def run_file(source: str, *arguments: str) -> pytest.RunResult:
        folder = pytester.path / "tests" / "gpu"
        folder.mkdir(parents=True)
        (folder / "test_gpu.py").write_text(textwrap.dedent(source))
        return pytester.runpytest_subprocess(folder, "-p", "no:cacheprovider", *arguments)

    return run_file


def test_gpu_tests_without_a_gpu_are_counted_apart_and_told_why(run_gpu_tests) -> None:
    result = run_gpu_tests(GPUS, "--max-skips=0")
    result.assert_outcomes(passed=1, skipped=2)
    result.stdout.fnmatch_lines(
        [
            "skipped for missing tools or packages: 0 (none)",
            "not run, for they need a GPU: 2 (no GPU: the driver is missing)",
        ]
    )
    assert result.ret == pytest.ExitCode.OK


def test_no_test_of_another_folder_is_let_off_for_want_of_a_gpu(run) -> None:
    result = run(GPUS, "--max-skips=0")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["failed: 2 skipped, where at most 0 may be"])


def test_no_gpu_test_is_let_off_for_want_of_anything_else(run_gpu_tests) -> None:
    result = run_gpu_tests(NEEDY, "--max-skips=0")
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_one_gpu_may_be_required(run_gpu_tests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEEDER_GPU", "required")
    result = run_gpu_tests(GPUS)
    result.assert_outcomes(passed=1, failed=1, skipped=1)
    result.stdout.fnmatch_lines(["*FEEDER_GPU is 'required', but the driver is missing*"])


ADAPTER = """
    import needs
    needs.needs_framework("no_such_framework")
    import no_such_framework
"""


@pytest.fixture
def run_adapter_tests(run, pytester: pytest.Pytester):
    """Return a function that runs a test file of the folder of the adapters' tests."""

    def run_file(source: str, *arguments: str) -> pytest.RunResult:
        folder = pytester.path / "tests" / "adapters"
        folder.mkdir(parents=True)
        (folder / "test_adapter.py").write_text(textwrap.dedent(source))
        return pytester.runpytest_subprocess(folder, "-p", "no:cacheprovider", *arguments)

    return run_file


def test_files_without_their_framework_are_counted_apart(run_adapter_tests) -> None:
    result = run_adapter_tests(ADAPTER, "--max-skips=0")
    result.stdout.fnmatch_lines(["files not run, *: 1 (no framework: no_such_framework)"])
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED


def test_no_file_of_another_folder_is_let_off_for_want_of_a_framework(run) -> None:
    result = run(ADAPTER, "--max-skips=0")
    result.stdout.fnmatch_lines(["failed: 1 skipped, where at most 0 may be"])


def test_no_adapter_is_let_off_for_want_of_anything_else(run_adapter_tests) -> None:
    result = run_adapter_tests(NEEDY, "--max-skips=0")
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_frameworks_may_be_required(run_adapter_tests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEEDER_ADAPTERS", "required")
    result = run_adapter_tests(ADAPTER)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*No module named 'no_such_framework'*"])
