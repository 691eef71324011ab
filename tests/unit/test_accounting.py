"""The accounting of a test run: skips have reasons that can be required, known failures are compared as a set."""

import ast
import doctest
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.accounting import skips
from tests.accounting.baseline import Seen, compare
from tests.accounting.skips import REASONS, WORD, word_of

TESTS = Path(__file__).resolve().parents[1]
SKIPPING_CALLS = {"pytest.skip", "pytest.mark.skip", "pytest.mark.skipif", "pytest.importorskip"}
PLUGINS = ("-p", "tests.accounting.skips", "-p", "tests.accounting.baseline", "-p", "no:cacheprovider")


def run(pytester: pytest.Pytester, *words: str) -> pytest.RunResult:
    return pytester.runpytest_inprocess(*PLUGINS, *words)


# -- skips -------------------------------------------------------------------------------------------------------------
SKIPPING = """
import pytest

@pytest.mark.skipif(True, reason="no-proc: peak memory cannot be read here")
def test_marked():
    pass

@pytest.mark.parametrize("case", "ab")
def test_called(case):
    pytest.skip("model-not-cached: smol")

@pytest.mark.xfail
def test_expected():
    assert False

def test_passes():
    pass
"""


def test_skips_are_counted_by_reason_at_the_end(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SKIPPING)

    result = run(pytester)

    assert result.ret == 0
    result.assert_outcomes(passed=1, skipped=3, xfailed=1)
    result.stdout.fnmatch_lines(["*skips by reason*", "    2 model-not-cached: needs a checkpoint*", "    1 no-proc:*"])


@pytest.mark.parametrize(
    ("required", "errors", "failed"),
    [
        (["no-proc"], 1, 0),  # pytest calls what does not come through its setup an error
        (["model-not-cached"], 0, 2),
        (["model-not-cached", "no-proc"], 1, 2),
        (["model-not-cached:smol"], 0, 2),
        (["model-not-cached:large"], 0, 0),
        (["all"], 1, 2),
    ],
)
def test_a_required_reason_turns_its_skips_into_failures(
    pytester: pytest.Pytester, required: list[str], errors: int, failed: int
) -> None:
    pytester.makepyfile(SKIPPING)

    result = run(pytester, *(f"--require={reason}" for reason in required))

    assert result.ret == bool(errors + failed)
    result.assert_outcomes(passed=1, xfailed=1, skipped=3 - errors - failed, errors=errors, failed=failed)
    told = f"*skipped for '*which --require {required[0]} does not allow*"
    result.stdout.fnmatch_lines([told] if errors + failed else [])


def test_a_module_that_is_skipped_while_it_is_collected_can_be_required_too(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import pytest\npytest.importorskip('nothing_here', reason='missing-extra: nothing')")

    assert run(pytester).ret == pytest.ExitCode.NO_TESTS_COLLECTED
    result = run(pytester, "--require=missing-extra")
    assert result.ret != 0
    result.assert_outcomes(errors=1)


@pytest.mark.parametrize("reason", ["later", "", "no-proc, for now"])
def test_a_skip_without_a_machine_readable_reason_fails(pytester: pytest.Pytester, reason: str) -> None:
    pytester.makepyfile(f"import pytest\ndef test_it():\n    pytest.skip({reason!r})")

    result = run(pytester)

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"*skipped for {reason!r}: a reason begins with a word of*"])


def test_a_reason_that_nothing_skips_for_cannot_be_required(pytester: pytest.Pytester) -> None:
    result = run(pytester, "--require=modle-not-cached")

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--require modle-not-cached: no test skips for it; known: *model-not-cached*"])


def test_what_a_reason_may_be_called_is_as_written() -> None:
    assert doctest.testmod(skips) == (0, 2)


def test_every_skip_of_the_tests_begins_with_a_known_word() -> None:
    used = {(word_of(reason), file.name) for file in TESTS.rglob("*.py") for reason in reasons_in(file)}

    assert {word for word, _ in used if WORD.fullmatch(word)} >= {"model-not-cached", "native-library-missing"}
    assert sorted((word, file) for word, file in used if word not in REASONS) == []


def reasons_in(file: Path) -> Iterator[str]:
    """Reasons that a file of tests gives for its skips; an f-string as far as its first value, none as nothing."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        call = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and call in SKIPPING_CALLS:
            named = [keyword.value for keyword in node.keywords if keyword.arg == "reason"]
            for value in named or (node.args[:1] if call == "pytest.skip" else [ast.Constant("")]):
                first = value.values[0] if isinstance(value, ast.JoinedStr) else value
                if isinstance(first, ast.Constant):  # a variable is judged when it is used
                    yield str(first.value)


# -- known failures ----------------------------------------------------------------------------------------------------
FAILING = """
import pytest

def test_good():
    pass

def test_bad():
    assert False

@pytest.fixture
def broken():
    raise ValueError

def test_broken(broken):
    pass
"""
BAD, BROKEN, GOOD = (f"test_it.py::test_{name}" for name in ("bad", "broken", "good"))


@pytest.mark.parametrize(
    ("listed", "exit_code", "told"),
    [
        ([BAD, BROKEN], 0, [f"{BAD} fails, as listed", f"{BROKEN} fails, as listed"]),
        ([BAD], 1, [f"{BROKEN} fails and is not listed"]),
        ([BAD, BROKEN, GOOD], 1, [f"{GOOD} is listed and passes: take it off the list"]),
        ([BAD, BROKEN, "test_it.py::test_gone"], 1, ["test_it.py::test_gone is listed and is no test: *"]),
        ([], 1, []),
    ],
)
def test_failures_are_compared_with_the_list_as_a_set(
    pytester: pytest.Pytester, listed: list[str], exit_code: int, told: list[str]
) -> None:
    pytester.makepyfile(test_it=FAILING)
    listing = pytester.mkdir("tests") / "baseline_failures.txt"
    listing.write_text("\n".join(["# a comment", "", *(f"{test}  # why" for test in listed)]))

    result = run(pytester)

    assert result.ret == exit_code
    for line in told:
        result.stdout.fnmatch_lines([line])


def test_a_part_of_the_tests_does_not_call_the_others_gone(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=FAILING, test_other="def test_fine():\n    pass")
    (pytester.mkdir("tests") / "baseline_failures.txt").write_text(f"{BAD}\n{BROKEN}\n")

    assert run(pytester, "test_other.py").ret == 0
    assert run(pytester, "-k", "fine").ret == 0
    assert run(pytester, "-x").ret == 0


# -- over workers ------------------------------------------------------------------------------------------------------
WORKERS = ("-p", "xdist", "-n2", "--dist", "loadfile")


def test_what_workers_report_is_judged_once_by_the_process_that_all_report_to(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=FAILING, test_skips=SKIPPING)
    listing = pytester.mkdir("tests") / "baseline_failures.txt"
    listing.write_text(f"{BAD}\n{BROKEN}\ntest_it.py::test_gone\n")

    gone = run(pytester, *WORKERS)
    listing.write_text(f"{BAD}\n{BROKEN}\ntest_skips.py::test_marked\n")
    green = run(pytester, *WORKERS)

    assert (gone.ret, green.ret) == (1, 0)
    gone.assert_outcomes(passed=2, failed=1, errors=1, skipped=3, xfailed=1)
    about = [line for line in gone.outlines if "::" in line and "listed" in line]
    assert about == [
        "test_it.py::test_gone is listed and is no test: take it off the list",
        f"{BAD} fails, as listed",
        f"{BROKEN} fails, as listed",
    ]
    assert [line.split(":")[0] for line in gone.outlines if ": needs " in line] == [
        "    2 model-not-cached",
        "    1 no-proc",
    ]


def test_a_required_reason_fails_its_skips_on_workers_too(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        SKIPPING, test_absent="import pytest\npytest.importorskip('nothing_here', reason='missing-extra: it')"
    )

    result = run(pytester, *WORKERS, "--require=model-not-cached:smol", "--require=missing-extra")

    assert result.ret == 1
    result.assert_outcomes(passed=1, failed=2, errors=1, skipped=1, xfailed=1)


IDS = st.frozensets(st.sampled_from("abcdef"))


@given(listed=IDS, failed=IDS, passed=IDS)
def test_a_run_is_green_exactly_when_what_fails_is_what_is_listed(
    listed: frozenset[str], failed: frozenset[str], passed: frozenset[str]
) -> None:
    passed -= failed
    result = compare(listed, Seen(set(passed | failed), set(passed), set(failed)), is_whole=True)

    assert result.is_green == (failed == listed)
