"""Reads what a command has written with `--json`, and holds it to the schema that is in the package."""

import importlib.resources
import json

import jsonschema

SCHEMA = json.loads((importlib.resources.files("ppe_ddp.cli") / "report.schema.json").read_text())
PARTS = {part["title"]: {"$defs": SCHEMA["$defs"], **part} for part in SCHEMA["oneOf"]}


def _refuse(constant):
    raise ValueError(f"{constant} is no JSON")


def report_in(text):
    """The report in `text`, which keeps to the schema."""
    report = json.loads(text, parse_constant=_refuse)
    jsonschema.validate(report, PARTS[report["command"]])  # whose messages are clearer than those of oneOf
    return report
