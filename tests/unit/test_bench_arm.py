import doctest
import subprocess
import sys
from pathlib import Path

import pytest

from pocketllm.bench import arm
from pocketllm.bench.arm import Isolation, Role, Via, claim, leave_client_a_core, make_arms, parse_arm
from pocketllm.bench.arm.checkout import Checkout
from pocketllm.bench.arm.recipes import recipes
from pocketllm.engine.options import SWITCHABLE, EngineOptions
from pocketllm.errors import OptionError


def test_an_arm_has_a_name_and_typed_options() -> None:
    parsed = parse_arm("wide:max_num_seqs=4,watermark=0.5,prefill_chunk=64")

    assert parsed.name == "wide"
    assert parsed.options == {"max_num_seqs": 4, "watermark": 0.5, "prefill_chunk": 64}
    assert parse_arm("base").options == {}


def test_a_url_takes_the_rest_of_the_string_colons_and_commas_included() -> None:
    assert parse_arm("peer:url=http://127.0.0.1:8080/a,b/v1/").url == "http://127.0.0.1:8080/a,b"


@pytest.mark.parametrize("key", sorted(SWITCHABLE))
def test_every_switchable_option_is_accepted(key: str) -> None:
    assert list(parse_arm(f"x:{key}=1").options) == [key]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is not a name"),
        (":prefill_chunk=64", "is not a name"),
        ("a b", "is not a name"),
        ("x" * 33, "is not a name"),
        ("null", "joins by itself"),
        ("x:", "nothing follows the colon"),
        ("x:prefill_chunk", "is not key=value"),
        ("x:prefill_chunk=64,", "nothing follows the last comma"),
        ("x:prefill_chunk=many", "is not a whole number"),
        ("x:prefill_chunk=64,prefill_chunk=32", "given twice"),
        ("x:nonsense=1", "unknown key 'nonsense'; known: model, backend, "),
        ("x:prefil_chunk=64", "unknown key 'prefil_chunk' (did you mean prefill_chunk?); known: model, "),
        ("x:environment=1", "unknown key 'environment'"),
        ("x:cmd=", "cmd='' must be a text"),
        ("x:cmd=server 'open", "cannot be split into words"),
        ("x:cmd=server {weights}", "unknown placeholder {weights}; known: {model_path}"),
        ("x:recipe=nobody", "no recipe 'nobody'; known: llama-server, vllm, sglang, ollama, pocketllm"),
        ("x:prefill_chunk=64,cmd=server", "cmd cannot be combined with prefill_chunk"),
        ("x:recipe=vllm,cmd=server", "cmd and recipe cannot be combined"),
        ("x:via=pigeon", "via='pigeon'; known: http, engine"),
        ("x:via=engine,path=../other", "cannot run in this process"),
        ("x:args=-fa", "args needs recipe"),
        ("x:key_env=KEY", "key_env needs url"),
        ("x:ready_timeout=soon,cmd=server", "ready_timeout='soon' is not a number of seconds"),
        ("x:ready=health,cmd=server", "must be a path such as /health"),
        ("x:recipe=vllm,ready_timeout=0", "above 0"),
        ("missing.toml", "no such file"),
        ("x:url=127.0.0.1:8080", "not an http"),
        ("x:url=http://", "not an http"),
        ("x:url=http://h:99999/", "not an http"),
        ("x:url=http://user:secret@h/", "without user"),
        ("x:prefill_chunk=64,url=http://h", "cannot be combined"),
    ],
)
def test_a_bad_arm_is_refused_in_one_sentence(text: str, reason: str) -> None:
    with pytest.raises(OptionError, match="--arms") as caught:
        parse_arm(text)

    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_null_arm_joins_by_itself_as_a_copy_of_the_baseline() -> None:
    arms = make_arms(["base:prefill_chunk=32", "b"], EngineOptions())

    assert arms.names == ("base", "b", "null")
    assert [item.role for item in arms.arms] == [Role.BASELINE, Role.CANDIDATE, Role.NULL]
    assert arms.null is not None
    assert arms.null.options == arms.baseline.options
    assert arms.isolation is Isolation.TOGGLE


def test_a_single_arm_is_compared_with_its_null() -> None:
    assert make_arms(["base"], EngineOptions()).names == ("base", "null")


def test_baseline_names_another_arm_than_the_first() -> None:
    arms = make_arms(["a", "b:prefill_chunk=64"], EngineOptions(), baseline="b")

    assert arms.names == ("b", "a", "null")
    assert arms.null is not None
    assert arms.null.options == {"prefill_chunk": 64}


def test_servers_are_attached_and_the_null_is_the_same_address() -> None:
    arms = make_arms(["a:url=http://h:1", "b:url=http://h:2"], EngineOptions())

    assert arms.isolation is Isolation.ATTACH
    assert arms.null is not None
    assert arms.null.url == "http://h:1"


@pytest.mark.parametrize(
    ("texts", "kwargs", "reason"),
    [
        ([], {}, "no arms"),
        (["a", "a:prefill_chunk=2"], {}, "two arms are called"),
        (["a", "b"], {}, "equal in plan, commit and target"),
        (["a", "b:prefill_chunk=256"], {}, "equal in plan, commit and target"),
        (["a:url=http://h:1", "b:url=http://h:1/v1"], {}, "equal in plan, commit and target"),
        (["a:cmd=server -p {port}", "b:cmd=server -p {port}"], {}, "equal in plan, commit and target"),
        (["a:via=http", "b:via=http,prefill_chunk=256"], {}, "equal in plan, commit and target"),
        (["a", "b:via=http"], {}, "equal in plan, commit and target"),
        (["a:via=engine", "b:via=http"], {}, "make another arm the baseline"),
        (["a", "b:path=/nowhere"], {}, "is no checkout of pocketllm"),
        (["a", "b:url=http://h:1"], {}, "serve both"),
        (["a"], {"with_null": False}, "nothing to compare"),
        (["a", "b:prefill_chunk=2"], {"baseline": "c"}, "is not an arm; arms: a, b"),
        (["a", "b:prefill_chunk=0"], {}, r"prefill_chunk=0 \(--arms b\) must be at least 1"),
        (["a", "b:watermark=2"], {}, "between 0 and 1"),
        (["a", "b:max_num_batched_tokens=4"], {}, "below max_num_seqs"),
    ],
)
def test_a_set_of_arms_that_means_nothing_is_refused(texts: list[str], kwargs: dict[str, object], reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        make_arms(texts, EngineOptions(), **kwargs)  # type: ignore[arg-type]  # a table of keyword arguments


@pytest.mark.parametrize(
    "texts",
    [
        ["a", "b:threads=1"],
        ["a", "b:backend=reference"],
        ["a", "b:prefill_chunk=64,via=http"],
        ["a:via=http", "b:via=engine"],
        ["a", "b:cmd=server --port {port}"],
        ["a", "b:recipe=llama-server"],
    ],
)
def test_what_cannot_be_switched_gives_every_arm_a_process(texts: list[str]) -> None:
    assert make_arms(texts, EngineOptions()).isolation is Isolation.PROCESS


def test_arms_that_are_processes_leave_the_client_a_core_where_nobody_said_how_many_threads() -> None:
    apart, switched = (
        make_arms(["a:via=http", "b:recipe=llama-server"], EngineOptions()),
        make_arms(["a"], EngineOptions()),
    )

    left = leave_client_a_core(apart, EngineOptions(), 4)
    assert left.threads == 3
    assert left.said("threads") == "threads=3 (default: one core is the client's)"
    for arms, options, cores in (
        (apart, EngineOptions(threads=4), 4),
        (apart, EngineOptions(), 1),
        (switched, EngineOptions(), 4),
    ):
        assert leave_client_a_core(arms, options, cores) is options


def test_a_command_takes_the_rest_of_the_string_and_fills_its_placeholders_word_by_word() -> None:
    launch = parse_arm(
        "x:ready=/health,ready_timeout=9,cmd=server -m {model_path} -p {port},x --json '{\"a\": 1}'"
    ).launch

    assert launch is not None
    assert (launch.ready_path, launch.ready_timeout_s) == ("/health", 9.0)
    assert launch.words({"model_path": "/a b/m.gguf", "port": "7"}) == [
        *("server", "-m", "/a b/m.gguf", "-p", "7,x", "--json", '{"a": 1}')
    ]


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_makes_an_arm_that_more_arguments_can_be_given_to(name: str) -> None:
    launch = parse_arm(f"x:recipe={name},args=--more 1,2").launch

    assert launch is not None
    assert launch.words({})[-2:] == ["--more", "1,2"]
    assert "{port}" in launch.command + str(launch.environment)
    assert launch.recipe == name


def test_arms_can_stand_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "arms.toml"
    file.write_text(
        'baseline = "b"\n[arms.a]\nprefill_chunk = 64\n'
        '[arms.b]\nvia = "http"\nenvironment = { OMP_NUM_THREADS = "1" }\n'
        '[arms."llama.cpp"]\nrecipe = "llama-server"\nready_timeout = 30\n'
    )
    arms = make_arms([str(file), "c:via=engine"], EngineOptions())

    assert arms.names == ("b", "a", "llama.cpp", "c", "null")
    assert arms.baseline.environment == {"OMP_NUM_THREADS": "1"}
    assert arms.null is not None
    assert arms.null.environment == arms.baseline.environment
    assert arms.arms[1].options == {"prefill_chunk": 64}
    assert arms.arms[2].launch is not None
    assert arms.arms[2].launch.ready_timeout_s == 30.0
    assert arms.arms[3].via is Via.ENGINE


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[arms", "is not valid TOML"),
        ("", "there is no"),
        ("[arms]\na = 1", r"\[arms.a\]: 1 is not a table"),
        ("[arms.a]\nprefill_chunk = 'many'", r"\[arms.a\]: prefill_chunk='many' is not a whole number"),
        ("[arms.a]\nenvironment = { A = 1 }", "environment must be a table of texts"),
        ("[arms.a]\nurl = 'http://h'\nenvironment = { A = 'b' }", "that server runs already"),
        ("[arms.a]\n[more]", "'more' is not known"),
        ("[arms.null]", "joins by itself"),
    ],
)
def test_a_file_that_means_nothing_is_refused_by_its_place(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "arms.toml").write_text(text)

    with pytest.raises(OptionError, match=reason) as caught:
        make_arms([str(tmp_path / "arms.toml")], EngineOptions())

    assert str(tmp_path) not in str(caught.value)


def test_a_claim_says_when_it_speaks_of_these_processes_only() -> None:
    assert "these processes only: each arm was started 2 times" in claim(Isolation.PROCESS, 2)
    assert "started afresh 5 times" in claim(Isolation.PROCESS, 5)
    assert "another copy of the baseline" in claim(Isolation.PROCESS, 5)


# -- another checkout --------------------------------------------------------------------------------------------------
@pytest.fixture
def worktree(tmp_path: Path) -> Path:
    """A repository with one commit that holds a package of our name."""
    root = tmp_path / "wt"
    (root / "pocketllm").mkdir(parents=True)
    (root / "pocketllm" / "__init__.py").write_text("")
    for words in (["init", "-q"], ["add", "."], [*IDENTITY, "commit", "-q", "-m", "x"]):
        subprocess.run(["git", "-C", str(root), *words], check=True)
    return root


IDENTITY = ("-c", "user.name=x", "-c", "user.email=x@example.org")


def test_another_checkout_is_another_arm_and_the_same_one_twice_is_refused(worktree: Path) -> None:
    assert make_arms(["a", f"b:path={worktree}"], EngineOptions()).isolation is Isolation.PROCESS

    with pytest.raises(OptionError, match="arms b and c are equal"):
        make_arms(["a", f"b:path={worktree}", f"c:path={worktree}"], EngineOptions())


def test_this_very_checkout_by_its_path_is_refused() -> None:
    ours = Path(__file__).resolve().parents[2]

    with pytest.raises(OptionError, match="arms a and b are equal in plan, commit and target"):
        make_arms(["a", f"b:path={ours}"], EngineOptions())


def test_a_checkout_tells_its_commit_and_changes_with_its_files(worktree: Path) -> None:
    checkout = Checkout.at("x", str(worktree))
    clean, told = checkout.identity(), checkout.code()
    (worktree / "notes.md").write_text("not part of what runs")
    still = checkout.identity()
    (worktree / "pocketllm" / "new.py").write_text("")

    assert still == clean
    assert told["dirty"] is False
    assert len(told["commit"]) == 40
    assert checkout.identity() != clean
    assert checkout.python == sys.executable


def test_a_checkout_with_a_virtual_environment_is_run_by_it(worktree: Path) -> None:
    python = worktree / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)

    assert Checkout.at("x", str(worktree)).command("serve")[0] == str(python)


def test_code_of_the_other_checkout_runs_and_not_the_one_beside_it(worktree: Path, tmp_path: Path) -> None:
    # a decoy in the working directory, which `python -c` would look into first
    decoy = tmp_path / "pocketllm" / "cli"
    decoy.mkdir(parents=True)
    for folder in (decoy.parent, decoy):
        (folder / "__init__.py").write_text("raise SystemExit('the decoy ran')")
    cli = worktree / "pocketllm" / "cli"
    cli.mkdir()
    (cli / "__init__.py").write_text("")
    (cli / "main.py").write_text("import sys\ndef app(**_): print('the other checkout:', *sys.argv[1:])\n")
    command = Checkout.at("x", str(worktree)).command("serve", "--port=0")
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)

    assert answer.stdout.strip() == "the other checkout: serve --port=0"


def test_no_null_leaves_two_arms() -> None:
    assert make_arms(["a", "b:prefill_chunk=2"], EngineOptions(), with_null=False).names == ("a", "b")


def test_the_examples_of_arms_are_true() -> None:
    assert doctest.testmod(arm).failed == 0
