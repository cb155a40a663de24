"""The OpenAPI document is the documentation: complete, true to what is answered, and valid."""

import json
import re

import jsonschema
import pytest

from loraplex.platform.api import examples
from loraplex.platform.api.documented import TAGS
from loraplex.platform.app import ROUTERS

pytestmark = pytest.mark.anyio

METHODS = {"get", "post", "put", "patch", "delete", "head"}
PUBLIC = {"/healthz", "/readyz"}


@pytest.fixture(scope="module")
def told():
    """The document as text, once an app has told it: all tell the same."""
    return []


@pytest.fixture
def document(world, told):
    if not told:
        told.append(json.dumps(world.app.openapi()))
    return json.loads(told[0])


def operations(document):
    return [
        (f"{method.upper()} {path}", operation)
        for path, item in document["paths"].items()
        for method, operation in item.items()
        if method in METHODS
    ]


def check(document, schema, value):
    """Fail unless the value is of a schema of the document."""
    schema = {"components": document["components"]} | schema
    errors = jsonschema.Draft202012Validator(schema).iter_errors(value)
    assert not [(error.json_path, error.message) for error in errors]


def complaints(document, name, operation):
    """What a reader would miss of an operation."""
    if not operation.get("summary") or len(operation.get("description", "")) < 20:
        yield "no description"
    if not {*operation.get("tags", ())} <= {*TAGS} or not operation.get("tags"):
        yield "no known tag"
    if not re.fullmatch(r"[a-z]+_[a-z_]+", operation["operationId"]):
        yield f"an unreadable operationId {operation['operationId']}"
    for parameter in operation.get("parameters", ()):
        if not parameter.get("description") and parameter["in"] != "path":
            yield f"no description of {parameter['name']}"
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        if media == "application/json" and not has_example(document, content):
            yield "no example of its body"
    if not name.startswith("HEAD"):
        yield from missing_answers(document, operation)


def missing_answers(document, operation):
    for status, response in operation["responses"].items():
        content = response.get("content", {}).get("application/json", {})
        if status < "300" and "application/json" in response.get("content", {}):
            if not content.get("schema"):
                yield f"no type of its answer {status}"
            elif not has_example(document, content):
                yield f"no example of its answer {status}"
        shape = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
        if status >= "400" and shape not in ("Error", "MessageError", "Readiness"):
            yield f"no error of {status}"


def resolve(document, schema):
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def has_example(document, content):
    """Whether a reader sees one: given, or made of those of all fields that must be there."""
    if "example" in content or "examples" in content:
        return True
    return bool(example_of(document, content.get("schema", {}), set()))


def example_of(document, schema, seen):
    """An example, or a true value where a newcomer can tell what to write."""
    name, schema = schema.get("$ref"), resolve(document, schema)
    if name in seen:
        return True
    seen = seen | {name}
    if "examples" in schema or "const" in schema or "enum" in schema or "default" in schema:
        return True
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return any(example_of(document, each, seen) for each in schema[key])
    if schema.get("type") == "array":
        return example_of(document, schema.get("items", {}), seen)
    if schema.get("type") == "object" and "properties" in schema:
        required = schema.get("required", ())
        return all(example_of(document, schema["properties"][each], seen) for each in required)
    return schema.get("type") in ("integer", "boolean", "number", "null", "string", "object")


async def test_every_route_is_documented(document):
    found = [
        f"{name}: {complaint}"
        for name, operation in operations(document)
        for complaint in complaints(document, name, operation)
    ]
    assert not found, "\n" + "\n".join(found)


async def test_every_route_is_in_the_document(world, document):
    told = {name for name, _ in operations(document)}
    routes = [route for module in ROUTERS for route in module.router.routes]
    served = [route for route in routes if route.include_in_schema]
    for route in served:
        assert {f"{method} {route.path_format}" for method in route.methods} <= told
    assert len(served) == len(told)


async def test_operations_have_names_of_their_own(document):
    names = [operation["operationId"] for _, operation in operations(document)]
    assert len(set(names)) == len(names)


async def test_every_route_but_the_probes_asks_for_a_key(document):
    for name, operation in operations(document):
        open_to_all = name.partition(" ")[2] in PUBLIC
        assert ("security" not in operation) == open_to_all, name
        assert ("401" not in operation["responses"]) == open_to_all, name


async def test_schemas_are_valid(document):
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


def contents(operation):
    """The content of bodies and of answers."""
    yield from operation.get("requestBody", {}).get("content", {}).values()
    for response in operation["responses"].values():
        yield from response.get("content", {}).values()


async def test_examples_are_of_their_schemas(document):
    checked = 0
    for _, operation in operations(document):
        for content in contents(operation):
            given = [each["value"] for each in content.get("examples", {}).values()]
            for value in given + ([content["example"]] if "example" in content else []):
                check(document, content.get("schema", {}), value)
                checked += 1
        for parameter in operation.get("parameters", ()):
            for value in parameter["schema"].get("examples", ()):
                check(document, parameter["schema"], value)
                checked += 1
    for schema in document["components"]["schemas"].values():
        for described in (schema, *schema.get("properties", {}).values()):
            for value in described.get("examples", ()):
                check(document, described, value)
                checked += 1
    assert checked > 100


BODIES = {
    f"{path}, {name}": (path, body)
    for path, bodies in {
        "/v1/chat/completions": examples.CHATS,
        "/v1/completions": examples.COMPLETIONS,
        "/v1/responses": examples.RESPONSES,
        "/v1/responses/input_tokens": examples.INPUTS,
        "/v1/messages": examples.MESSAGES,
        "/v1/messages/count_tokens": examples.COUNTS,
    }.items()
    for name, body in bodies.items()
}


@pytest.mark.parametrize(("path", "body"), BODIES.values(), ids=BODIES.keys())
async def test_examples_work_and_answers_are_of_their_schemas(world, document, path, body):
    await world.add_adapter("acme", "support")
    explained = {} if "tokens" in path else {"loraplex": True}
    told = document["paths"][path]["post"]["responses"]["200"]
    async with world.client() as client:
        for more in ({}, explained):
            answer = await client.post(path, json=body | {"model": "support"} | more)
            assert answer.status_code == 200, answer.text
            ours = {name for name in answer.headers if name.startswith("x-loraplex-")}
            assert ours <= {*told.get("headers", {})}
            if not body.get("stream"):
                check(document, told["content"]["application/json"]["schema"], answer.json())
            elif path != "/v1/messages":
                check_stream(document, told["content"]["text/event-stream"], answer.text)


def check_stream(document, described, text):
    lines = [line.partition(": ") for line in text.splitlines() if line]
    chunks = [data for name, _, data in lines if name == "data"]
    if not any(name == "event" for name, *_ in lines):
        assert chunks.pop() == "[DONE]"
    for chunk in chunks:
        check(document, described["x-events"], json.loads(chunk))


async def test_the_document_is_served_to_everybody(world, document):
    async with world.client(None) as client:
        assert (await client.get("/openapi.json")).json() == document
