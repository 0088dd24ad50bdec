"""JSON Schema of the flags of a command (draft 2020-12): the output of `--help_json`.

The schema describes the nested form of a configuration file, as in a run folder's `config.yaml`.
The keyword `x-no-effect` marks a flag that does nothing while the other flags have their defaults.
The keyword's value is the reason, for example "without --ds.lora.rank".
"""

import math
from typing import Any

from openrlhf.config.effects import unused_flags
from openrlhf.config.flags import Flag, flags_of

JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object"}
KEYWORDS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
}


def json_schema(root: type[Any], command: str) -> dict[str, Any]:
    """Return the schema of a command: an object per section, with a property per flag."""
    schema = _object(root.__doc__)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = f"openrlhf {command}"
    defaults = root()
    conditions = unused_flags(defaults)
    for flag in flags_of(root).values():
        *sections, leaf = flag.path.split(".")
        node = schema
        section = defaults
        for name in sections:
            section = getattr(section, name)
            node = node["properties"].setdefault(name, _object(section.__doc__))
        described = _property(flag)
        if flag.not_yet:
            described["description"] += " Not available yet."
        if flag.path in conditions:
            described["x-no-effect"] = conditions[flag.path]
        node["properties"][leaf] = described
    return schema


def _object(description: str | None) -> dict[str, Any]:
    return {
        "type": "object",
        "description": description,
        "additionalProperties": False,
        "properties": {},
    }


def _property(flag: Flag) -> dict[str, Any]:
    value: dict[str, Any] = {"type": JSON_TYPES[flag.kind]}
    for name, limit in flag.limits.items():
        value[KEYWORDS[name]] = limit
    if flag.choices is not None:
        value["enum"] = list(flag.choices)
    schema: dict[str, Any] = value
    if flag.shape in ("pair", "list"):
        schema = {"type": "array", "items": value}
    if flag.shape == "pair":
        schema |= {"minItems": 2, "maxItems": 2}
    if flag.single is not None:
        schema["minItems"] = 1
    if flag.optional:
        schema["type"] = [schema["type"], "null"]
        if "enum" in schema:
            schema["enum"].append(None)
    schema |= {"title": flag.name, "description": flag.help}
    if flag.required:
        schema["description"] += " Required here or on the command line."
    if not (isinstance(flag.default, float) and math.isinf(flag.default)):  # not in JSON
        schema["default"] = flag.default
    if flag.secret:
        schema["writeOnly"] = True
    return schema
