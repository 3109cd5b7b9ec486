"""The help is the schema, and nothing in the schema is without effect."""

import ast
import dataclasses
import subprocess
import sys

import pytest

from jaxtpu import cli
from jaxtpu.config import Config, mesh_sizes
from jaxtpu.config.help import config_help
from jaxtpu.config.section import Section
from jaxtpu.mesh import make_mesh
from jaxtpu.sharding import make_rules
from tests.config import ROOT

CONFIG = Config()
SECTIONS = [CONFIG] + [
    getattr(CONFIG, field.name)
    for field in dataclasses.fields(CONFIG)
    if isinstance(getattr(CONFIG, field.name), Section)
]
FIELDS = {
    section.dotted(field.name): field
    for section in SECTIONS
    for field in dataclasses.fields(section)
    if not isinstance(getattr(section, field.name), Section)
}


def squeezed(text: str) -> str:
    """`text` without white space: lines are broken anywhere."""
    return "".join(text.split())


def entry(name: str) -> str:
    """What the help says of a field, squeezed."""
    lines = config_help().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(f"  {name}: "))
    after = lines[first + 1 :]
    last = next((i for i, line in enumerate(after) if line[:6].strip()), len(after))
    return squeezed("".join([lines[first], *after[:last]]))


def test_help_comes_from_run_py_without_jax():
    code = (
        "import runpy, sys\n"
        "sys.argv[1:] = ['help']\n"
        "try: runpy.run_path('run.py', run_name='__main__')\n"
        "finally: print('jax' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    for text in ("run.py --config=FILE", "run.py generate --workdir=DIR", "Exit codes: 0 done"):
        assert text in done.stdout
    assert done.stdout.endswith("False\n")


def test_help_config_is_printed(capsys):
    assert cli.main(["help", "config"]) == 0
    printed = capsys.readouterr()
    assert printed.out == config_help() and not printed.err
    assert max(map(len, printed.out.splitlines())) <= 100
    for unit in ("steps", "epochs", "examples", "tokens", "%"):
        assert unit in printed.out.splitlines()[0]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.path or "top level")
def test_every_section_is_in_the_help(section):
    first_line = type(section).__doc__.splitlines()[0]
    assert f"\n{section.path or 'top level'}: {first_line}\n" in config_help()


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_is_in_the_help(name):
    metadata, said = FIELDS[name].metadata, entry(name)
    assert metadata["doc"].strip()
    assert said.startswith(squeezed(f"{name}: {metadata['doc']} ("))
    assert squeezed(f"default {FIELDS[name].default!r}") in said
    assert squeezed(", ".join(metadata["choices"])) in said
    for limit in ("at_least", "below"):
        if metadata[limit] is not None:
            assert squeezed(f"{limit.replace('_', ' ')} {metadata[limit]}") in said


class Reads(ast.NodeVisitor):
    """The fields that some code reads, as dotted names.

    What `config` or another variable holds is told by its annotation (`config: ModelConfig`), by
    what was assigned to it (`data = config.data`), or else by its name.
    """

    sections = {type(section).__name__: section.path for section in SECTIONS}

    def __init__(self) -> None:
        self.found: set[str] = set()
        self.held: dict[str, str] = {section.path: section.path for section in SECTIONS[1:]}

    def section_of(self, node: ast.expr) -> str | None:
        """The path of the section that an expression is; None where it is none."""
        if isinstance(node, ast.Name):
            return self.held.get(node.id)
        if isinstance(node, ast.Attribute) and node.attr in self.sections.values():
            return node.attr
        return "" if isinstance(node, ast.Attribute) and node.attr == "config" else None

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer, self.held = self.held, dict(self.held)
        for argument in node.args.args + node.args.kwonlyargs:
            kind = getattr(argument.annotation, "id", None)
            if kind in self.sections:
                self.held[argument.arg] = self.sections[kind]
        self.generic_visit(node)
        self.held = outer

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = zip(target.elts, node.value.elts, strict=True)
            for name, held in pairs:
                path = self.section_of(held)
                if isinstance(name, ast.Name) and path is not None:
                    self.held[name.id] = path

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        path = self.section_of(node.value)
        if path is not None and isinstance(node.ctx, ast.Load):
            self.found.add(f"{path}.{node.attr}" if path else node.attr)

    def visit_Constant(self, node: ast.Constant) -> None:
        """A field may be read by name: `getattr(data, split_field)` with "train_split"."""
        self.found |= {name for name in FIELDS if name == f"data.{node.value}"}


def read_by(source: str) -> set[str]:
    visitor = Reads()
    visitor.visit(ast.parse(source))
    return visitor.found


def test_the_reader_tells_sections_apart():
    source = """
def one(config: ModelConfig, other):
    a, b = config.embed, other.config.train
    train, data = other.config.train, other.config.data
    return b.steps, train.epochs, getattr(data, "train_split"), other.loss

def two(config: Config):
    config.model.heads = 3
    return config.seed, lambda: config.optimizer.name
"""
    assert read_by(source) & FIELDS.keys() == {
        "model.embed", "train.epochs", "train.steps", "data.train_split", "seed", "optimizer.name",
    }  # fmt: skip


def test_no_field_is_dead():
    """Each is read outside of the configuration, whose checks alone have no effect on a run."""
    read = set()
    for path in (ROOT / "jaxtpu").rglob("*.py"):
        if path.parent.name != "config":
            read |= read_by(path.read_text())
    # The length of the run is worked out, and the mesh and the rule table are read as a whole.
    functions = ast.parse((ROOT / "jaxtpu" / "config" / "validate.py").read_text()).body
    read |= read_by(
        next(ast.unparse(f) for f in functions if getattr(f, "name", "") == "run_units")
    )
    sizes = mesh_sizes(CONFIG.mesh, 8)
    read |= {f"mesh.{axis}" for axis in make_mesh(sizes).shape}
    read |= {f"sharding.{axis}" for axis in make_rules(CONFIG.sharding, make_mesh(sizes)).table}
    assert sorted(FIELDS.keys() - read) == []
