"""Tests for import directions (docs/architecture.md), function lengths and code density."""

from __future__ import annotations

import ast
import sys
from fnmatch import fnmatch

import pytest

from tests.density import BOUNDS, density
from tests.sources import Module, loaded_with, package

LEVELS = {
    room: level
    for level, rooms in enumerate(
        (
            ("event_loop", "masking", "units"),
            ("reporting",),
            ("config", "core", "files", "locks", "ring", "termination"),
            ("algorithms", "checks", "layer_plan", "observability", "planning", "rendezvous"),
            ("weights",),
            ("models", "data", "training"),
            ("cluster", "isolation", "checkpoints"),
            ("rewards", "workers", "serving"),
            ("rollout",),
            ("agents",),
            ("trainers", "utils"),
            ("launch",),
            ("evaluation", "doctor"),
            ("cli",),
        )
    )
    for room in rooms
}
# The packages that may import each heavy library. Many packages use torch and transformers.
HOMES = {
    "vllm": ["rollout.engine*", "doctor.probes"],
    "cloudpickle": ["rollout.engine*"],
    "deepspeed": ["training.*"],
    "ray": [
        "cluster.ray_cluster",
        "cluster.placement",
        "cluster.worker_group",
        "rollout.fleet",
    ],
    "datasets": ["data.*"],
    "math_verify": ["rewards.graders"],
    "wandb": ["observability.trackers"],
    "rich": ["observability.*"],
    "peft": ["models.adapters", "training.tensor_parallel", "checkpoints.combine"],
    "bitsandbytes": ["training.whole", "training.adam_8bit"],
    "fastapi": ["serving.server", "agents.openai_endpoint"],
    "uvicorn": ["serving.server", "serving.connections", "agents.openai_endpoint"],
}
# Libraries that a module may load when imported, besides the standard library and our modules.
STANDARD_LIBRARY_ONLY = [
    "checks",
    "config*",
    "core.trajectory",
    "event_loop",
    "locks",
    "masking",
    "planning*",
    "reporting",
    "termination",
    "units",
    "utils",
    "cli*",
]
# Declares the names and traits under which algorithms register estimators and losses.
NAMES_AND_TRAITS = {"openrlhf.config", "openrlhf.config.choices"}
WITHOUT_TORCH = ["isolation*", "agents.contract", "agents.program", "rewards*"]
# Modules that write to a stream without using `reporting`.
WRITE_THEMSELVES = [
    "reporting",
    "isolation.program",  # runs in a user-code process and loads none of our modules
    "rollout.engine_check",  # prints JSON for another process
]
# Packages whose density must stay within the bounds.
WITHIN_BOUNDS = [
    "agents",
    "algorithms",
    "checkpoints",
    "cli",
    "cluster",
    "config",
    "core",
    "data",
    "doctor",
    "evaluation",
    "isolation",
    "launch",
    "models",
    "observability",
    "planning",
    "rewards",
    "rollout",
    "serving",
    "trainers",
    "training",
    "weights",
    "workers",
]
MODULES = sorted(package().values(), key=str)


def within(module: Module, patterns: list[str]) -> bool:
    return any(fnmatch(module.name.removeprefix("openrlhf."), pattern) for pattern in patterns)


def libraries(names: set[str]) -> set[str]:
    tops = {name.split(".")[0] for name in names}
    return tops - {"openrlhf", "__future__"} - sys.stdlib_module_names


def test_every_module_is_in_a_package_with_a_level() -> None:
    assert {module.room for module in MODULES} - {""} <= LEVELS.keys()


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_modules_import_only_from_lower_levels_and_not_from_siblings(module: Module) -> None:
    rooms = {name.split(".")[1] for name in module.imports() if name.startswith("openrlhf.")}
    others = rooms & LEVELS.keys() - {module.room}
    wrong = {room for room in others if LEVELS[room] >= LEVELS.get(module.room, 9)}
    assert not wrong, f"{module} (level {LEVELS[module.room]}) imports {sorted(wrong)}"


def test_there_are_no_import_cycles() -> None:
    """Imports inside functions and imports for type checking count too.

    Modules without imports are removed repeatedly; any remaining modules are part of a cycle.
    """
    graph = {
        name: module.imports() & package().keys() - {name} for name, module in package().items()
    }
    while free := {name for name, imports in graph.items() if not imports & graph.keys()}:
        graph = {name: imports for name, imports in graph.items() if name not in free}
    assert {name: sorted(imports & graph.keys()) for name, imports in graph.items()} == {}


@pytest.mark.parametrize("library", HOMES)
def test_heavy_libraries_are_imported_only_by_allowed_packages(library: str) -> None:
    users = [module for module in MODULES if library in libraries(module.imports())]
    assert [str(module) for module in users if not within(module, HOMES[library])] == []
    assert users, f"no module imports {library}: remove its entry"


def test_algorithms_import_torch_but_none_of_our_classes() -> None:
    for module in (module for module in MODULES if module.room == "algorithms"):
        assert libraries(module.imports()) <= {"torch", "jaxtyping"}, module
        ours = {name for name in module.imports() if name.startswith("openrlhf")}
        for name in ours:
            assert name.startswith("openrlhf.algorithms") or name in NAMES_AND_TRAITS, module


def test_only_reporting_writes_to_the_terminal() -> None:
    ways = {"print", "warnings.warn", "sys.stdout.write", "sys.stderr.write"}
    ways.add("logging.getLogger(__name__)")
    writers = {
        f"{module}:{node.lineno}"
        for module in MODULES
        if not within(module, WRITE_THEMSELVES)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and {ast.unparse(node), ast.unparse(node.func)} & ways
    }
    assert writers == set(), "write with openrlhf.reporting"


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_light_modules_load_no_heavy_library(module: Module) -> None:
    loaded = libraries(loaded_with(module.name))
    if within(module, STANDARD_LIBRARY_ONLY):
        assert not loaded
    if within(module, WITHOUT_TORCH):
        assert not loaded & {"torch", "transformers", "ray", "vllm", "deepspeed"}


def test_engines_and_servers_never_load_deepspeed_and_trainers_never_load_vllm() -> None:
    for module in (
        module
        for module in MODULES
        if module.room in ("weights", "rollout", "serving", "rewards", "isolation")
    ):
        assert "deepspeed" not in loaded_with(module.name), module
    for module in (
        module for module in MODULES if module.room in ("workers", "trainers", "launch")
    ):
        assert "vllm" not in loaded_with(module.name), module


def test_functions_have_at_most_60_lines() -> None:
    long_functions = {
        f"{module} {name}": lines
        for module in MODULES
        for name, lines in module.functions()
        if lines > 60
    }
    assert long_functions == {}


def test_public_classes_and_functions_have_docstrings() -> None:
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    missing: list[str] = []
    for module in MODULES:
        bodies = [module.tree.body]
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                bodies.append(node.body)
        for node in (node for body in bodies for node in body if isinstance(node, kinds)):
            if not node.name.startswith("_") and not ast.get_docstring(node):
                missing.append(f"{module}:{node.lineno} {node.name}")
    assert missing == []


@pytest.mark.parametrize("room", WITHIN_BOUNDS)
def test_package_density_is_within_bounds(room: str) -> None:
    found = density(module.tree for module in MODULES if module.room == room)
    assert {name: round(value, 1) for name, value in found.items() if value > BOUNDS[name]} == {}


def test_density_excludes_docstrings_imports_and_annotations() -> None:
    """The statement `x` has 2 nodes. The function has 3 nodes: itself, its arguments, and `a`."""
    tree = ast.parse('"""Doc."""\nimport os\n\ndef f(a: int) -> int:\n    """Doc."""\n    x\n')
    assert density([tree])["mean"] == (2 + 3) / 2


def test_density_counts_nested_comprehensions() -> None:
    nested = density([ast.parse("[[a if b else c for a in d] for d in e]")])
    nodes = 14
    assert nested["conditionals"] == 10_000 / nodes and nested["comprehensions"] == 20_000 / nodes
    assert nested["nested"] == 10_000 / nodes
