"""One file a family: nothing outside models/ and weights/ asks which architecture a checkpoint has."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "pocketllm"
THEIRS = (PACKAGE / "engine" / "models", PACKAGE / "engine" / "weights")
OUTSIDE = sorted(path for path in PACKAGE.rglob("*.py") if not any(folder in path.parents for folder in THEIRS))


def is_architecture(node: ast.AST) -> bool:
    """`architecture`, or anything's attribute of that name."""
    return (isinstance(node, ast.Name) and node.id == "architecture") or (
        isinstance(node, ast.Attribute) and node.attr == "architecture"
    )


def names_something(node: ast.AST) -> bool:
    """Whether it is a string that is written out, or some of them; an empty one and a wildcard name no family."""
    parts = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    texts = (part.value for part in parts if isinstance(part, ast.Constant))
    return any(isinstance(text, str) and text not in ("", "*") for text in texts)


def switches(source: str) -> list[int]:
    """Lines that compare an architecture with one that is written out."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Compare():
                sides = [node.left, *node.comparators]
                if any(map(is_architecture, sides)) and any(map(names_something, sides)):
                    found.append(node.lineno)
            case ast.Match() if is_architecture(node.subject):
                found.append(node.lineno)
            case ast.Call(func=ast.Attribute(value=value, attr="startswith" | "endswith")) if is_architecture(value):
                found.append(node.lineno)
    return found


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_outside_the_models_asks_which_family_it_is(path: Path) -> None:
    assert switches(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "if architecture == 'llama': pass",
        "x = checkpoint.architecture in ('qwen2', 'qwen3')",
        "match plan.architecture:\n    case 'gemma3': pass",
        "plan.architecture.startswith('gemma')",
        "x = 1 if 'llama' != model.architecture else 2",
    ],
)
def test_the_check_itself_catches_a_switch(source: str) -> None:
    assert switches(source)
