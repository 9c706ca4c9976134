"""JSON Schema of a scenario's TOML form, for editors; what stands under a key describes it."""

import ast
import inspect
from itertools import pairwise
from typing import Any

from harness import scenario_file
from harness.scenario_tables import decisions, engines, machinery, nodes, offered, serving


def json_schema() -> dict[str, Any]:
    schema = scenario_file.ScenarioFile.model_json_schema()
    told = _key_docstrings()
    for table, definition in schema["$defs"].items():
        for key, value in definition["properties"].items():
            if (table, key) in told:
                value["description"] = told[table, key]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _key_docstrings() -> dict[tuple[str, str], str]:
    """The string under each key of a table, by table and key. Read when the schema is asked for:
    pydantic would parse the file for every table, each time a scenario is read."""
    found = {}
    rooms = (offered, decisions, engines, machinery, nodes, serving)
    trees = [ast.parse(inspect.getsource(room)) for room in rooms]
    for table in (node for tree in trees for node in tree.body):
        if not isinstance(table, ast.ClassDef):
            continue
        for key, under in pairwise(table.body):
            if isinstance(key, ast.AnnAssign) and isinstance(under, ast.Expr):
                assert isinstance(key.target, ast.Name), "a key is a plain name"
                assert isinstance(under.value, ast.Constant), "what stands alone is a docstring"
                found[table.name, key.target.id] = inspect.cleandoc(str(under.value.value))
    return found
