"""The style of the code: docstrings that stand by themselves, files and functions of readable length."""

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import muster

PACKAGE = Path(muster.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

FORBIDDEN = {"What", "Whether", "How", "Where", "Of", "Those", "By", "Why", "Which", "Who", "That", "Such"}
"""First words of sentences that need the name or the line above them."""

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield a module and its statements, those within others too, without the many nodes of their expressions."""
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        yield node
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            within = getattr(node, part, [])
            stack += within if isinstance(within, list) else []


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every docstring of modules, classes and functions, and of names above a string."""
    for node in statements(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                value = statement.value if isinstance(statement, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield statement.lineno, value.value


def first_word(text: str) -> str:
    words = text.split()
    return words[0].strip(",.:;") if words else ""


@pytest.mark.parametrize("text", ["What a plan holds.", "Of the best, how many.", "\n    Whether it fits."])
def test_docstrings_that_need_another_line_are_found(text):
    (found,) = docstrings(ast.parse(f'"""{text}"""'))
    assert first_word(found[1]) in FORBIDDEN


def test_docstrings_stand_by_themselves():
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {text.splitlines()[0]}"
        for path in FILES
        for line, text in docstrings(parsed(path))
        if first_word(text) in FORBIDDEN
    ]
    assert not found


def runtime_imports(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports when it runs, wherever in it, without imports for type checkers."""
    stack: list[ast.AST] = [parsed(path)]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        stack += ast.iter_child_nodes(node)


def circles(imports: dict[str, set[str]]) -> list[str]:
    """Return the modules that import themselves through others, found by dropping modules without open imports."""
    left = {module: set(names) for module, names in imports.items()}
    while free := [module for module, names in left.items() if not names & left.keys()]:
        for module in free:
            del left[module]
    while free := [module for module in left if not any(module in names for names in left.values())]:
        for module in free:
            del left[module]
    return sorted(left)


def test_a_circle_is_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c"]
    assert not circles({"a": {"b", "c"}, "b": {"c"}, "c": set()})


def test_no_module_imports_itself_through_others():
    names = {path: ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in FILES}
    modules = {name.removesuffix(".__init__"): path for path, name in names.items()}
    imports = {name: {other for other in runtime_imports(path) if other in modules} for name, path in modules.items()}
    assert not circles(imports)


def constants_set_twice(tree: ast.Module) -> list[str]:
    """Return the constants of a module that a second assignment replaces: readers between the two see either."""
    targets = [
        target
        for statement in tree.body
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
    ]
    elements = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
    names = [part.id for part in elements if isinstance(part, ast.Name) and part.id.isupper()]
    return sorted(name for name, count in Counter(names).items() if count > 1)


def test_a_constant_that_is_set_twice_is_found():
    assert constants_set_twice(ast.parse("A = {}\nA |= {1: 2}\nA[3] = 4\nB: int = 1\nA, b = 1, 2\nb = 3")) == ["A"]


def test_constants_are_set_once():
    found = [
        f"{path.relative_to(PACKAGE.parent)}: {name}"
        for path in [*FILES, *Path(__file__).parent.rglob("*.py")]
        for name in constants_set_twice(parsed(path))
    ]
    assert not found


def test_files_and_functions_are_short():
    long = []
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        if text.count("\n") > MAX_FILE_LINES:
            long.append(f"{path.relative_to(PACKAGE)}: {text.count(chr(10))} lines")
        for node in statements(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    long.append(f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}: {lines} lines")
    assert not long
