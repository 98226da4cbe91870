"""JSON schemas of the kinds that JSONSchemaBench gathers: functions, services, forms, odd corners.

Texts and lists are bounded where the schema allows it, so that even a model without sense comes to an end.

References
----------
Geng et al., "JSONSchemaBench: A Rigorous Benchmark of Structured Outputs for Language Models", 2025.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def text(most: int = 8, **more: Any) -> Schema:
    return {"type": "string", "maxLength": most, **more}


def whole(least: int | None = None, most: int | None = None, **more: Any) -> Schema:
    bounds = {"minimum": least, "maximum": most}
    return {"type": "integer", **{key: value for key, value in bounds.items() if value is not None}, **more}


def items(of: Any, most: int = 3, **more: Any) -> Schema:
    return {"type": "array", "items": of, "maxItems": most, **more}


def thing(required: Schema, optional: Schema | None = None, **more: Any) -> Schema:
    """Return an object's schema; without `more`, closed."""
    properties = {**required, **(optional or {})}
    closed = {"additionalProperties": False, **more}
    return {"type": "object", "properties": properties, "required": [*required], **closed}


def defined(root: Schema, **definitions: Schema) -> Schema:
    return {**root, "$defs": definitions}


def ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


ANY_SMALL = {"enum": ["a", 0, None, True]}
FLAG = {"type": "boolean"}
MONEY = {"type": "number", "minimum": 0, "maximum": 1000, "multipleOf": 0.01}
POINT = thing({"x": whole(-9, 9), "y": whole(-9, 9)})
TREE = defined(ref("node"), node=thing({"v": whole(0, 9)}, {"next": items(ref("node"), 1)}))

SCALARS: list[Schema] = [
    FLAG,
    {"type": "null"},
    whole(0, 9),
    whole(-5, 5),
    whole(-1000, -7),
    whole(17, 17),
    whole(0, 100, multipleOf=5),
    whole(multipleOf=12, least=0, most=600),
    {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 5},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "exclusiveMinimum": -0.5, "exclusiveMaximum": 0.5},
    {"type": "number", "minimum": 99.5, "maximum": 100.25},
    MONEY,
    {"type": ["integer", "null"], "minimum": 1, "maximum": 3},
    {"type": ["boolean", "null"]},
    {"const": "on"},
    {"const": 3.5},
    {"const": {"a": [1, {"b": None}], "c": "\u00e9"}},
    {"enum": ["red", "green", "blue"]},
    {"enum": [1, 2.5, "x", None, True, [1], {"k": "v"}]},
    {"enum": ['"quoted"', "back\\slash", "new\nline", "tab\t", "\u00fc"]},
]
TEXTS: list[Schema] = [
    text(0),
    text(5),
    text(6, minLength=6),
    text(12, minLength=1),
    {"type": "string", "pattern": "^[A-Z]{2}[0-9]{4}$"},
    {"type": "string", "pattern": "^(cat|dog)s?$"},
    {"type": "string", "pattern": r"^\d{3}-\d{4}$"},
    {"type": "string", "pattern": "^#[0-9a-f]{6}$"},
    {"type": "string", "pattern": r"^v\d{1,2}(\.\d{1,2}){2}$"},
    {"type": "string", "pattern": "^[a-z]{1,4}(-[a-z]{1,4}){0,2}$"},
    {"type": "string", "pattern": "^.{2,4}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "duration", "maxLength": 12},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "email", "maxLength": 16},
]
ARRAYS: list[Schema] = [
    items(FLAG, 0),
    items(whole(0, 9), 3),
    items(whole(0, 9), 4, minItems=4),
    items(text(4), 2, minItems=1),
    items(items(whole(0, 1), 2, minItems=2), 2, minItems=2),
    items(POINT, 2),
    {"type": "array", "prefixItems": [text(4), whole(0, 9)], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [FLAG], "items": whole(0, 9), "minItems": 1, "maxItems": 3},
    {"type": "array", "prefixItems": [{"const": "set"}, text(5), ANY_SMALL], "items": False, "minItems": 3},
    items({"enum": ["a", "b"]}, 3),
    items({"anyOf": [whole(0, 9), {"type": "null"}]}, 3),
    items(MONEY, 2, minItems=2),
]
OBJECTS: list[Schema] = [
    thing({}),
    thing({"a": whole(0, 9)}),
    thing({}, {"a": FLAG}),
    thing({"a": FLAG}, {"b": FLAG, "c": FLAG}),
    thing({}, {name: whole(0, 1) for name in "abcdefgh"}),
    thing(
        {
            "name": text(8),
            "age": whole(0, 120),
            "mail": {"type": "string", "format": "email", "maxLength": 12},
        }
    ),
    thing({"id": {"type": "string", "format": "uuid"}, "at": {"type": "string", "format": "date-time"}}),
    thing({"first name": text(4), 'a"b': FLAG, "\u00e5": FLAG, "back\\": FLAG}),
    thing({"p": POINT, "q": {"anyOf": [POINT, {"type": "null"}]}}),
    thing({"a": thing({"b": thing({"c": thing({"d": whole(0, 9)})})})}),
    thing({"list": items(thing({"k": text(3), "v": ANY_SMALL}), 2)}),
    {"type": "object", "additionalProperties": whole(0, 9), "maxProperties": 0},
    thing({"a": FLAG}, additionalProperties=False, minProperties=1),
    thing({"nullable": {"type": ["string", "null"], "maxLength": 3}}),
    thing({"matrix": items(items(whole(-1, 1), 2, minItems=2), 2, minItems=2)}),
    thing({"b": FLAG, "a": FLAG, "c": FLAG}),
    thing({"status": {"enum": ["ok", "error"]}, "code": whole(100, 599)}, {"detail": text(8)}),
    thing({"price": MONEY, "currency": {"enum": ["EUR", "USD"]}, "tags": items(text(3), 2)}),
    thing({"empty": text(0), "none": {"type": "null"}, "list": items(FLAG, 0), "object": thing({})}),
]
UNIONS: list[Schema] = [
    {"anyOf": [whole(0, 9), text(3)]},
    {"anyOf": [POINT, items(whole(0, 9), 2, minItems=2)]},
    {"oneOf": [whole(0, 9), text(3), {"type": "null"}]},
    {
        "oneOf": [
            thing({"kind": {"const": "circle"}, "r": whole(1, 9)}),
            thing({"kind": {"const": "square"}, "side": whole(1, 9)}),
        ]
    },
    {
        "anyOf": [
            thing({"op": {"const": "add"}, "of": items(whole(0, 9), 2)}),
            thing({"op": {"const": "set"}, "to": ANY_SMALL}),
            thing({"op": {"const": "drop"}}),
        ]
    },
    {"allOf": [whole(0, 50), whole(10, 100)]},
    {"allOf": [text(8), {"minLength": 2}, {"pattern": "^[a-c]+$"}]},
    {"allOf": [{"type": "object", "properties": {"a": FLAG}}, thing({"a": FLAG, "b": whole(0, 9)})]},
    {"anyOf": [{"const": 1}, {"enum": ["x", "y"]}, items(FLAG, 1)]},
    {"type": "object", "anyOf": [thing({"a": FLAG}), thing({"b": FLAG})]},
    thing({"value": {"anyOf": [FLAG, whole(0, 9), text(3), {"type": "null"}, items(whole(0, 9), 2)]}}),
]
REFERENCES: list[Schema] = [
    TREE,
    defined(thing({"from": ref("city"), "to": ref("city")}), city={"enum": ["Oslo", "Rome", "Lima"]}),
    defined(items(ref("p"), 2, minItems=1), p=POINT),
    defined(ref("a"), a=ref("b"), b=ref("c"), c=whole(0, 9)),
    {"definitions": {"flag": FLAG}, **thing({"x": {"$ref": "#/definitions/flag"}})},
    defined({"anyOf": [ref("leaf"), ref("pair")]}, leaf=whole(0, 9), pair=items(ref("leaf"), 2, minItems=2)),
    thing({"self": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}),
    defined(
        thing({"cart": items(ref("line"), 2)}),
        line=thing({"sku": ref("sku"), "n": whole(1, 9)}),
        sku={"type": "string", "pattern": "^[A-Z]{3}-[0-9]{2}$"},
    ),
]


def _function(name: str, **arguments: Schema) -> Schema:
    return thing({"name": {"const": name}, "arguments": thing(arguments)})


FUNCTIONS: list[Schema] = [
    _function("get_weather", city=text(8), unit={"enum": ["C", "F"]}),
    _function(
        "send_mail",
        to=items({"type": "string", "format": "email", "maxLength": 12}, 1, minItems=1),
        urgent=FLAG,
    ),
    _function(
        "search", query=text(10), limit=whole(1, 50), filters=items(thing({"f": text(3), "v": text(3)}), 1)
    ),
    _function(
        "book",
        day={"type": "string", "format": "date"},
        seats=whole(1, 8),
        window={"type": ["boolean", "null"]},
    ),
    _function("move", path=items(POINT, 2), speed={"type": "number", "minimum": 0, "maximum": 9.5}),
    _function("noop"),
    items({"anyOf": [_function("a", x=whole(0, 9)), _function("b", y=FLAG)]}, 2, minItems=1),
]
SERVICES: list[Schema] = [
    thing(
        {
            "apiVersion": {"const": "v1"},
            "kind": {"enum": ["Pod", "Service"]},
            "metadata": thing(
                {"name": {"type": "string", "pattern": "^[a-z]{1,6}$"}},
                {"labels": thing({}, {"app": text(4)})},
            ),
            "spec": thing(
                {"ports": items(thing({"port": whole(1, 65535), "protocol": {"enum": ["TCP", "UDP"]}}), 1)}
            ),
        }
    ),
    thing(
        {
            "on": items({"enum": ["push", "pull_request"]}, 2),
            "jobs": thing(
                {
                    "build": thing(
                        {"runs-on": {"const": "ubuntu-latest"}, "steps": items(thing({"run": text(8)}), 2)}
                    )
                }
            ),
        }
    ),
    thing(
        {
            "type": {"const": "Feature"},
            "geometry": thing(
                {
                    "type": {"const": "Point"},
                    "coordinates": items({"type": "number", "minimum": -90, "maximum": 90}, 2, minItems=2),
                }
            ),
        }
    ),
    thing(
        {"jsonrpc": {"const": "2.0"}, "id": {"anyOf": [whole(0, 99), {"type": "null"}]}, "result": ANY_SMALL}
    ),
    thing(
        {"log": items(thing({"level": {"enum": ["info", "warn"]}, "ms": whole(0, 5000), "msg": text(8)}), 2)}
    ),
    thing({"question": text(10), "choices": items(text(4), 3, minItems=2), "answer": whole(0, 2)}),
    thing(
        {
            "thought": text(12),
            "verdict": {"enum": ["yes", "no"]},
            "score": {"type": "number", "minimum": 0, "maximum": 10},
        }
    ),
    thing(
        {"rows": items({"type": "array", "prefixItems": [text(3), MONEY], "items": False, "minItems": 2}, 2)}
    ),
]

SCHEMAS: list[Schema] = [
    *SCALARS, *TEXTS, *ARRAYS, *OBJECTS, *UNIONS, *REFERENCES, *FUNCTIONS, *SERVICES,
]  # fmt: skip
