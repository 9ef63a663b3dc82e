"""What lacks a tool, a GPU or a framework is skipped and counted, up to a limit."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Run = Callable[..., pytest.RunResult]

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

GPUS = """
    import needs

    needs.why_no_gpus = lambda num: "the driver is missing" if num else ""

    def test_needs_one(): needs.needs_gpus(1)
    def test_needs_two(): needs.needs_gpus(2)
    def test_needs_none(): needs.needs_gpus(0)
"""

ADAPTER = """
    import needs
    needs.needs_framework("no_such_framework")
    import no_such_framework
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs a file of tests in a folder, here."""
    for name in ("FEEDER_MAX_SKIPS", "FEEDER_GPU", "FEEDER_ADAPTERS"):
        monkeypatch.delenv(name, raising=False)
    pytester.makeconftest(
        """
        import needs
        def pytest_addoption(parser): needs.add_option(parser)
        def pytest_configure(config): needs.configure(config)
        """
    )

    def run_file(source: str, *arguments: str, folder: str = ".") -> pytest.RunResult:
        path = pytester.makepyfile(source)
        place = pytester.path / folder
        place.mkdir(parents=True, exist_ok=True)
        return pytester.runpytest_inprocess(path.rename(place / "test_it.py"), *arguments)

    return run_file


@pytest.mark.parametrize(("limit", "status"), [("3", 0), ("2", 1), ("0", 1)])
@pytest.mark.parametrize("place", ["option", "environment"])
def test_more_skips_than_allowed_fail_the_run(
    run: Run, place: str, limit: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place == "environment":
        monkeypatch.setenv("FEEDER_MAX_SKIPS", limit)
    result = run(NEEDY, *(["--max-skips", limit] if place == "option" else []))
    assert result.ret == status
    told = f"failed: 3 skipped, where at most {limit} may be"
    assert (told in result.stdout.str()) == bool(status)


def test_what_needs_a_gpu_or_a_framework_is_counted_apart(run: Run) -> None:
    result = run(GPUS, "--max-skips=0", folder="tests/gpu")
    result.assert_outcomes(passed=1, skipped=2)
    result.stdout.fnmatch_lines(
        [
            "skipped for missing tools or packages: 0 (none)",
            "not run, for they need a GPU: 2 (no GPU: the driver is missing)",
        ]
    )
    assert result.ret == pytest.ExitCode.OK
    result = run(ADAPTER, "--max-skips=0", folder="tests/adapters")
    result.stdout.fnmatch_lines(["files not run, *: 1 (no framework: no_such_framework)"])
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
