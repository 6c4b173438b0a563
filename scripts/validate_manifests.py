"""Check Kubernetes manifests strictly, without a cluster: ``.venv-deploy/bin/python -m scripts.validate_manifests KINDS
VERSION … < MANIFESTS``. Prints a line for each error, and exits with 1 if there is any.

Kubernetes' own kinds are checked against its schemas, in which unknown fields are errors. KINDS is a JSON file with
schemas of other kinds by ``apiVersion Kind``. There, a field with ``x-pod-template`` is checked as a pod's template.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

Document = Mapping[str, Any]


def errors(document: Document, kinds: Mapping[str, Any], version: str) -> Iterator[str]:
    """Yield what is wrong with one object in that version of Kubernetes, each with its path."""
    schema = kinds.get(f"{document.get('apiVersion')} {document.get('kind')}")
    if schema is None:
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"{error.path}: {error.message}"
        except kubernetes_validate.SchemaNotFoundError as error:
            yield f"no schema: {error}"
        return
    for found in jsonschema.Draft202012Validator(schema).iter_errors(document):
        yield f"{'/'.join(map(str, found.absolute_path))}: {found.message}"
    for template in pod_templates(document, schema):
        yield from errors({"apiVersion": "v1", "kind": "PodTemplate", "template": template}, {}, version)


def pod_templates(value: Any, schema: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the parts of a value that the schema marks as templates of pods."""
    if schema.get("x-pod-template"):
        yield value
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from pod_templates(part, schema.get("properties", {}).get(name, {}))
    elif isinstance(value, list):
        for part in value:
            yield from pod_templates(part, schema.get("items", {}))


def main(arguments: Sequence[str]) -> int:
    kinds_file, *versions = arguments
    kinds = json.loads(Path(kinds_file).read_text())
    documents = [one for one in yaml.load_all(sys.stdin, Loader=yaml.CSafeLoader) if one]
    found = [
        f"{version} {one['kind']}/{one['metadata']['name']}: {error}"
        for version in versions
        for one in documents
        for error in errors(one, kinds, version)
    ]
    print("".join(f"{line[:400]}\n" for line in found), end="")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
