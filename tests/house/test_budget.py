"""Budget of the package: tokens and files, and private names that tests read. Raising a number here
is a visible change, and a commit says why."""

from __future__ import annotations

import ast
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import fp8_backends
from fp8_backends.formats.scaling import RULES

TOKENS, FILES = 300_000, 208
"""Tokens of Python without comments, docstrings and layout: dense formatting cannot lower them."""
SUFFIXES = (".py", ".pyi", ".cpp", ".css")
LAYOUT = ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENCODING", "ENDMARKER")

HABITS = {
    "comparisons with a rule's name": 15,
    "isinstance, hasattr, getattr": 715,
    "functions of more than 8 arguments": 25,
    "x if c else y": 1_157,
    "a, b = x, y": 324,
}
"""Habits that make code hard to read: 1 % above the numbers in the package."""
RULE_NAMES = {*RULES, "tensorwise"}
PRIVATE = 29
"""Accesses of tests to private names of the package."""
FOREIGN = """_dispatch_tokens _dynamo _experts_implementation _fields _foreach_norm _get_bias_tensors
    _get_weight_tensors _models _optimizers _parameters _prepare_tp _quantizer _replace _repr_html_ _reset_state
    _scale_inv _scaled_mm""".split()
"""Names of other libraries and protocols, which the package defines or overrides, too."""


def test_tokens_and_files_stay_within_the_budget():
    root = Path(fp8_backends.__file__).parent
    folders = Counter()
    for path in root.rglob("*.py"):
        folders[path.relative_to(root).parts[0] if path.parent != root else "."] += tokens(path)
    table = "\n".join(f"{count:7,} {folder}" for folder, count in folders.most_common())
    print(table)
    assert folders.total() <= TOKENS, f"{folders.total():,} tokens:\n{table}"
    assert sum(path.suffix in SUFFIXES for path in root.rglob("*")) <= FILES


def tokens(path: Path) -> int:
    """Count the tokens of a file, docstrings of attributes left out like all others."""
    texts = (
        node.value
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Expr)
    )
    skipped = {
        (text.lineno, text.col_offset)
        for text in texts
        if isinstance(text, ast.Constant) and isinstance(text.value, str)
    }
    count = depth = 0
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            name = tokenize.tok_name[token.type]
            depth += name == "FSTRING_START"  # an f-string is several tokens from Python 3.12 on
            count += not depth and name not in LAYOUT and token.start not in skipped
            if name == "FSTRING_END":
                depth -= 1
                count += not depth
    return count


def test_habits_stay_rare():
    root = Path(fp8_backends.__file__).parent
    found = Counter(
        habit for tree in trees(root) for node in ast.walk(tree) for habit in habits(node)
    )
    print(found)
    assert not {name: found[name] for name, most in HABITS.items() if found[name] > most}


def habits(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Compare):
        texts = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
        if texts & RULE_NAMES:
            yield "comparisons with a rule's name"
    elif isinstance(node, ast.Call):
        if getattr(node.func, "id", "") in ("isinstance", "hasattr", "getattr"):
            yield "isinstance, hasattr, getattr"
    elif isinstance(node, ast.FunctionDef):
        arguments = node.args
        if len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs) > 8:
            yield "functions of more than 8 arguments"
    elif isinstance(node, ast.IfExp):
        yield "x if c else y"
    elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
        if isinstance(node.targets[0], ast.Tuple):
            yield "a, b = x, y"


def test_tests_read_few_private_names():
    """Tests of behaviour survive a rewrite. A name that they need gets a public spelling."""
    own = {name for tree in trees(Path(fp8_backends.__file__).parent) for name in defined(tree)} - {
        *FOREIGN
    }
    found = Counter(
        name for tree in trees(Path(__file__).parents[1]) for name in read(tree) if name in own
    )
    table = "\n".join(f"{count:4} {name}" for name, count in found.most_common())
    print(table)
    assert found.total() <= PRIVATE, f"{found.total()} accesses:\n{table}"


def trees(folder: Path) -> Iterator[ast.AST]:
    return (ast.parse(path.read_text(encoding="utf-8")) for path in folder.rglob("*.py"))


def defined(tree: ast.AST) -> Iterator[str]:
    """Private functions, classes, globals, and attributes of `self`."""
    for node in ast.walk(tree):
        name = node.name if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else None
        if isinstance(getattr(node, "ctx", None), ast.Store):
            name = getattr(node, "id", node.attr if of_itself(node) else None)
        if name and name.startswith("_") and not name.startswith("__") and name != "_":
            yield name


def read(tree: ast.AST) -> Iterator[str]:
    """Attributes of anything but `self`, names that are imported, and texts for `setattr` and its
    like."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not of_itself(node):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.name
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("attr"):
            yield from (
                argument.value for argument in node.args if isinstance(argument, ast.Constant)
            )


def of_itself(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in ("self", "cls")
