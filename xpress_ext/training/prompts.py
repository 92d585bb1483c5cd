"""Prompts for training: GSM8K problems and functions to complete, in the target's chat template.

The code prompts look like HumanEval's (signature, docstring, often examples), but come from two
other sources: functions of the Python standard library, and small tasks composed from word lists
whose examples are computed. HumanEval itself is used for evaluation only.
"""

from __future__ import annotations

import ast
import json
import random
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CODE_INSTRUCTION = "Complete the following Python function.\n\n```python\n{function}\n```"


def chat_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids of one user message in the target's chat template, ready for its answer."""
    return list(
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
    )


def code_message(function: str) -> str:
    """The message that asks for a function (signature and docstring) to be completed."""
    return CODE_INSTRUCTION.format(function=function.strip("\n"))


def gsm8k_questions(path: str | Path) -> list[str]:
    """The `question` of every line of a GSM8K file."""
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line)["question"] for line in lines]


def code_messages(count: int, seed: int) -> list[str]:
    """`count` different messages, half of the standard library (where it has enough), shuffled."""
    rng = random.Random(seed)
    library = list(dict.fromkeys(standard_library_functions()))
    rng.shuffle(library)
    functions = library[: count // 2]
    seen = set(functions)
    while len(functions) < count:
        function = composed_function(rng)
        if function not in seen:
            seen.add(function)
            functions.append(function)
    rng.shuffle(functions)
    return [code_message(function) for function in functions]


# --- functions of the standard library ---


def standard_library_functions(max_characters: int = 900) -> Iterator[str]:
    """Signature and docstring of the documented plain functions of the standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for name in sorted(sys.stdlib_module_names):
        module = root / f"{name}.py"
        files = [module] if module.is_file() else sorted((root / name).glob("*.py"))
        for file in files:
            if name.startswith("_") or name in {"idlelib", "lib2to3", "test", "turtledemo"}:
                continue
            yield from _functions_of(file, max_characters)


def standard_library_modules() -> list[Path]:
    """Source files of the standard library's single-file modules."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (root / f"{name}.py" for name in sorted(sys.stdlib_module_names))
    return [file for file in files if file.is_file()]


def _functions_of(file: Path, max_characters: int) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("__"):
            continue
        docstring = ast.get_docstring(node)
        arguments = [a.arg for a in node.args.args if a.arg not in {"self", "cls"}]
        if not docstring or len(docstring) < 30 or not arguments:
            continue
        node.args.args = [a for a in node.args.args if a.arg not in {"self", "cls"}]
        node.args.defaults = node.args.defaults[-len(node.args.args) :]
        signature = f"def {node.name}({ast.unparse(node.args)}):"
        body = textwrap.indent(f'"""{docstring}\n"""', "    ")
        if len(signature) + len(body) <= max_characters:
            yield f"{signature}\n{body}"


# --- composed functions ---

_Values = list[Any]


def _integers(rng: random.Random) -> _Values:
    return [rng.randint(-9, 30) for _ in range(rng.randint(3, 6))]


def _words(rng: random.Random) -> _Values:
    pool = "apple river Stone cloud mirror level window Garden noon radar tree Python ocean light"
    return rng.sample(pool.split(), rng.randint(2, 4))


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


# (name, phrase, test) for members of a list of integers or of strings.
_INTEGER_TESTS: list[tuple[str, str, Callable[[int], bool]]] = [
    ("even", "even", lambda n: n % 2 == 0),
    ("odd", "odd", lambda n: n % 2 == 1),
    ("positive", "positive", lambda n: n > 0),
    ("negative", "negative", lambda n: n < 0),
    ("prime", "prime", _is_prime),
    ("divisible_by_three", "divisible by three", lambda n: n % 3 == 0),
    ("multiple_of_five", "multiples of five", lambda n: n % 5 == 0),
    ("greater_than_ten", "greater than ten", lambda n: n > 10),
    ("single_digit", "single-digit", lambda n: 0 <= n <= 9),
    ("square", "perfect squares", lambda n: n >= 0 and int(n**0.5) ** 2 == n),
]
_WORD_TESTS: list[tuple[str, str, Callable[[str], bool]]] = [
    ("palindrome", "palindromes", lambda w: w.lower() == w.lower()[::-1]),
    ("capitalized", "capitalized", lambda w: w[0].isupper()),
    ("long", "longer than five characters", lambda w: len(w) > 5),
    ("vowel", "starting with a vowel", lambda w: w[0].lower() in "aeiou"),
    ("even_length", "of even length", lambda w: len(w) % 2 == 0),
    ("containing_e", "containing the letter e", lambda w: "e" in w.lower()),
    ("lowercase", "in lower case", lambda w: w.islower()),
]
# (name, phrase, result type, function of the selected members in their order)
_INTEGER_ACTIONS: list[tuple[str, str, str, Callable[[_Values], Any]]] = [
    ("sum", "the sum of the numbers that are {}", "int", sum),
    ("count", "how many of the numbers are {}", "int", len),
    ("filter", "a list of the numbers that are {}, in their order", "List[int]", list),
    ("sorted", "the numbers that are {} in ascending order", "List[int]", sorted),
    (
        "largest",
        "the largest of the numbers that are {}, or None if there is none",
        "Optional[int]",
        lambda v: max(v, default=None),
    ),
    (
        "smallest",
        "the smallest of the numbers that are {}, or None if there is none",
        "Optional[int]",
        lambda v: min(v, default=None),
    ),
    (
        "double",
        "a list of the numbers that are {}, each multiplied by two",
        "List[int]",
        lambda v: [2 * n for n in v],
    ),
    (
        "squares_of",
        "a list of the squares of the numbers that are {}",
        "List[int]",
        lambda v: [n * n for n in v],
    ),
    (
        "average",
        "the average of the numbers that are {}, or 0.0 if there are none",
        "float",
        lambda v: round(sum(v) / len(v), 2) if v else 0.0,
    ),
    ("any", "True if any of the numbers is {}, otherwise False", "bool", bool),
    ("reverse", "the numbers that are {} in reverse order", "List[int]", lambda v: v[::-1]),
    (
        "unique",
        "the different numbers that are {}, without duplicates, sorted",
        "List[int]",
        lambda v: sorted(set(v)),
    ),
    (
        "product",
        "the product of the numbers that are {} (1 for none)",
        "int",
        lambda v: __import__("math").prod(v),
    ),
    (
        "difference",
        "the difference between the largest and the smallest of the numbers that "
        "are {}, or 0 if there are none",
        "int",
        lambda v: max(v) - min(v) if v else 0,
    ),
]
_WORD_ACTIONS: list[tuple[str, str, str, Callable[[_Values], Any]]] = [
    ("count", "how many of the strings are {}", "int", len),
    ("filter", "a list of the strings that are {}", "List[str]", list),
    ("join", "the strings that are {}, joined with spaces", "str", " ".join),
    (
        "upper",
        "the strings that are {}, in upper case",
        "List[str]",
        lambda v: [w.upper() for w in v],
    ),
    (
        "reverse",
        "the strings that are {}, each reversed",
        "List[str]",
        lambda v: [w[::-1] for w in v],
    ),
    (
        "longest",
        "the longest of the strings that are {}, or None if there is none",
        "Optional[str]",
        lambda v: max(v, key=len, default=None),
    ),
    (
        "lengths",
        "a list of the lengths of the strings that are {}",
        "List[int]",
        lambda v: [len(w) for w in v],
    ),
    ("sorted", "the strings that are {} in alphabetical order", "List[str]", sorted),
    (
        "first_letters",
        "the first letters of the strings that are {}, concatenated",
        "str",
        lambda v: "".join(w[0] for w in v),
    ),
    (
        "vowels",
        "the total number of vowels in the strings that are {}",
        "int",
        lambda v: sum(c in "aeiouAEIOU" for w in v for c in w),
    ),
]
_OPENINGS = [
    "Return {}.",
    "Given a list, return {}.",
    "Write a function that returns {}.",
    "You are given a list of {kind}. Your task is to return {}.",
    "This function takes a list of {kind} and returns {}.",
    "From a list of {kind}, find {}.",
]


def composed_function(rng: random.Random) -> str:
    """A small list task: signature, docstring and examples whose results are computed."""
    over_words = rng.random() < 0.4
    tests: list[Any] = list(_WORD_TESTS if over_words else _INTEGER_TESTS)
    actions = _WORD_ACTIONS if over_words else _INTEGER_ACTIONS
    test_name, test_phrase, test = rng.choice(tests)
    action_name, action_phrase, result_type, action = rng.choice(actions)
    kind, item_type = ("strings", "str") if over_words else ("integers", "int")
    argument = rng.choice(["words", "strings", "lst"] if over_words else ["numbers", "nums", "lst"])
    name = rng.choice(
        [
            f"{action_name}_{test_name}",
            f"{test_name}_{action_name}",
            f"get_{action_name}_{test_name}",
            f"{action_name}_{test_name}_{argument}",
        ]
    )
    text = rng.choice(_OPENINGS).format(action_phrase.format(test_phrase), kind=kind)
    examples = _examples(rng, name, _words if over_words else _integers, test, action)
    hints = rng.random() < 0.6
    signature = (
        f"def {name}({argument}: List[{item_type}]) -> {result_type}:"
        if hints
        else f"def {name}({argument}):"
    )
    imports = "from typing import List, Optional\n\n\n" if hints and rng.random() < 0.5 else ""
    docstring = textwrap.indent(f'"""{text}\n{examples}"""', "    ")
    return f"{imports}{signature}\n{docstring}"


def _examples(
    rng: random.Random,
    name: str,
    draw: Callable[[random.Random], _Values],
    test: Callable[[Any], bool],
    action: Callable[[_Values], Any],
) -> str:
    form = rng.choice(
        [
            ">>> {call}\n{result}\n",
            "{call} -> {result}\n",
            "{call} == {result}\n",
            "{call} ➞ {result}\n",
        ]
    )
    lines = []
    for _ in range(rng.randint(0, 3)):
        values = draw(rng)
        result = action([v for v in values if test(v)])
        lines.append(form.format(call=f"{name}({values!r})", result=repr(result)))
    return "".join(lines)
