"""What the scripted model answers to the questions of the peers' tests, where a test checks the answer."""

import json
from typing import Any

from compat.model import Answer, call


def _json(asked: str, value: Any) -> Answer:
    """``value``, which a format demands, behind words that only an answer without a format has."""
    return Answer((f"About {asked}: ", json.dumps(value)), asked)


def _weather(city: str, state: str) -> tuple[str, dict[str, Any]]:
    return "get_current_weather", {"unit": "fahrenheit", "city": city, "state": state}


def _employee(name: str, age: int) -> dict[str, Any]:
    work = [{"company": "Initech", "duration": 3, "position": "Engineer"}]
    return {"name": name, "age": age, "skills": ["C", "Go", "SQL"], "work_history": work}


ANN, BOB = _employee("Ann", 30), _employee("Bob", 41)
FORECAST = {"country": "Germany", "days": 5, "unit": "fahrenheit"}
BERLIN = {"unit": "fahrenheit", "country": "Germany", "city": "Berlin"}
VLLM = (
    # results of tools
    call("Paris", ("get_weather", {"latitude": 48.85, "longitude": 2.35}), result=True),
    Answer(("98 degrees in Dallas", " and 78 in Orlando."), "78 degrees", result=True),
    Answer(("It is 98 degrees", " now."), "98 degrees", result=True),
    Answer(("An otter", " on Tuesday."), "otter", result=True),
    Answer(("The tool", " answered."), result=True),
    # calls of tools
    call("Orlando", _weather("Dallas", "TX"), _weather("Orlando", "FL")),
    call("Dallas", ("get_current_weather", {"city": "Dallas", "state": "TX", "unit": "celsius"})),
    call("forecast", ("get_current_weather", BERLIN), ("get_forecast", FORECAST)),
    call("current weather", ("get_current_weather", {"country": "Germany", "unit": "celsius"})),
    call("get_time for Tokyo", ("get_weather", {"location": "Berlin, DE"}), ("get_time", {"location": "Tokyo"})),
    call("Call the get_weather function for Berlin", ("get_weather", {"location": "Berlin, Germany"})),
    call("weather like in Paris today", ("get_weather", {"latitude": 48.9, "longitude": 2.4})),
    call("random place", ("get_place_to_travel", {})),
    call("weather", ("get_weather", {"city": "Paris"})),
    call("time", ("get_current_time", {})),
    call("horoscope for", ("get_horoscope", {"sign": "Aquarius"})),
    call("Google Chrome", ("mcp__computer_use__get_app_state", {"app": "Google Chrome"})),
    call("employee profile", ("dummy_function_name", ANN)),
    call("different name and age", ("dummy_function_name", BOB)),
    # texts of a form
    _json("employee profile", ANN),
    _json("different name and age", BOB),
    _json('"result": 2', {"result": 2}),
    _json("science fair", {"event_name": "science fair", "date": "Friday", "participants": ["Alice", "Bob"]}),
    Answer(("127.0.0.1",), "IP address"),
    Answer(("10.0.0.7",), "a different one"),
    Answer(("Python",), "type-safe"),
    Answer(("Ruby",), "pick another one"),
    # facts
    Answer(("2",), "1+1? please"),
    Answer(("312.", " QED."), "13 * 24"),
    Answer(("30.", " QED"), "Multiply the result by 2"),
    Answer(("Mark",), "my real name"),
    Answer(("John",), "my name again"),
    Answer(("4",), "2+2"),
    Answer(("56088",), "123 * 456"),
)

SGLANG = (
    Answer(("The sum", " is 8."), result=True),
    call("(3+5)", ("add", {"a": 3, "b": 5})),
    call("sum 5 and 7", ("add", {"a": 5, "b": 7})),
    call("5 - 7", ("sub", {"int_a": 5, "int_b": 7})),
    call("in Paris", ("get_current_weather", {"city": "Paris", "unit": "celsius"})),
    call("Los Angeles", ("get_current_weather", {"location": "Los Angeles, CA"})),
    call("capital of France", ("get_current_weather", {"city": "Lyon", "unit": "celsius"})),
    call("France", ("get_weather", {"city": "Nice"})),
    call("about Paris", ("get_weather", {"city": "Paris"})),
    call("top 5", ("get_weather", {"city": "New York", "unit": "celsius"})),
    call("sights", ("get_weather", {"location": "Tokyo"}), ("get_tourist_attractions", {"city": "Osaka"})),
    call("metrics", ("analyze_data", {"data": {"metrics": ["one"]}})),
    Answer(('{\n   "name": "Paris",\n   "population": ', "2100000\n}"), "Introduce"),
    Answer(("Hey",), "a greeting"),
    Answer(('{"name":', '"Alice"}'), "only letters"),
    Answer(("{", '"capital": "Sofia"}'), "Bulgaria"),
    Answer(("2 + 2", " is 4.\n", "Done."), "2 + 2"),
    Answer(('"name": "SmartHome Mini",', ' "size": "5 inches"}'), "SmartHome Mini"),
)
