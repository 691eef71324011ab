"""What a source file makes a computer do: a change of comments, docstrings or layout is no change of it; pure."""

import ast
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import PurePosixPath

C_SUFFIXES = {".cpp", ".h", ".cu", ".cuh"}
STRINGS_AND_COMMENTS = re.compile(r'"(?:\\.|[^"\\\n])*"|//(?:\\\n|[^\n])*|/\*.*?\*/', re.DOTALL)

BODIES = ("body", "orelse", "finalbody", "handlers", "cases")
"""Where statements hold statements."""


@lru_cache(maxsize=1024)  # the proofs of a ladder mostly rest on the same files
def meaning(path: str, content: bytes, names: frozenset[str] | None = None) -> str:
    """A text that is equal for two versions of a file which do the same.

    names: the definitions of a Python module that are asked about, with what they use of it; None for all of it.
    A file that cannot be parsed means its own bytes.
    """
    text = content.decode("utf-8", "replace")
    suffix = PurePosixPath(path).suffix
    if suffix in C_SUFFIXES:
        return without_comments(text)
    if suffix != ".py":
        return text
    try:
        module = ast.parse(text)
    except SyntaxError:
        return text
    drop_docstrings(module)
    if names is None:
        return ast.dump(module)
    return "\n".join(sorted(map(ast.dump, used_of(module, names))))


def without_comments(text: str) -> str:
    """C++ without comments, its lines joined except those of the preprocessor.

    >>> without_comments('int a; // one\\n\\n  int  b = "//"; /* two */')
    'int a; int b = "//";'
    """
    bare = STRINGS_AND_COMMENTS.sub(lambda found: found[0] if found[0].startswith('"') else " ", text)
    lines = (" ".join(line.split()) for line in bare.splitlines())
    return " ".join(f"\n{line}\n" if line.startswith("#") else line for line in lines if line)


def drop_docstrings(node: ast.AST) -> None:
    """Take the docstring, and any other string that stands alone, out of every body."""
    for field in BODIES:
        inner = getattr(node, field, None)
        if isinstance(inner, list):  # an expression's body is no list
            kept = [statement for statement in inner if not is_string(statement)]
            setattr(node, field, kept)
            for statement in kept:
                drop_docstrings(statement)


def is_string(node: ast.AST) -> bool:
    """Whether a statement is a string and nothing else."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def used_of(module: ast.Module, names: frozenset[str]) -> list[ast.stmt]:
    """The statements that define these names, those that they use in turn, and those that define nothing."""
    defining: dict[str, list[ast.stmt]] = {}
    loose: list[ast.stmt] = []
    for statement in apart(module):
        defined = list(names_of(statement))
        loose += [] if defined else [statement]
        for name in defined:
            defining.setdefault(name, []).append(statement)
    chosen: dict[int, ast.stmt] = {}
    waiting = [*names]
    while waiting:
        for statement in defining.pop(waiting.pop(), ()):
            chosen[id(statement)] = statement
            waiting += [node.id for node in ast.walk(statement) if isinstance(node, ast.Name)]
    return [*loose, *chosen.values()]


def apart(module: ast.Module) -> Iterator[ast.stmt]:
    """The statements of a module, an import of several names as one of each."""
    for statement in module.body:
        if isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                yield ast.ImportFrom(statement.module, [alias], statement.level)
        else:
            yield statement


def names_of(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement of a module defines."""
    match statement:
        case ast.FunctionDef() | ast.ClassDef() | ast.AsyncFunctionDef():
            yield statement.name
        case ast.Assign(targets=targets):
            yield from (node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in aliases)
        case _:
            pass


def imported(content: bytes, package: str) -> Mapping[str, frozenset[str]]:
    """Names that a Python file imports from each module of a package, by the module's name below it.

    >>> imported(b"from a.b.blocks import Binder\\nfrom a.c import d\\nfrom a.b.parts.latent import Cache", "a.b")
    {'blocks': frozenset({'Binder'}), 'parts.latent': frozenset({'Cache'})}
    """
    found: dict[str, frozenset[str]] = {}
    try:
        module = ast.parse(content)
    except SyntaxError:
        return found  # somebody is writing it: the file itself has changed, and is found so
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{package}."):
            name = str(node.module).removeprefix(f"{package}.")
            found[name] = found.get(name, frozenset()) | {alias.name for alias in node.names}
    return found
