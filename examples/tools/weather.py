"""Tool calls with OpenAI's client: the model calls a function, receives its result, and answers.

Usage: `weather.py [URL [MODEL]]`.

Here the call is enforced (tool_choice), so that it works with any model; omit that if the model calls tools by itself.
"""

import json
import os
import sys

from openai import OpenAI

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city, now.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": ["Aachen", "Bonn", "Cologne"]},
                    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                },
                "required": ["city", "unit"],
            },
        },
    }
]


def get_weather(city: str, unit: str) -> str:
    """Return a fixed result in place of a real lookup."""
    return json.dumps({"city": city, "temperature": 21 if unit == "celsius" else 70, "sky": "clear"})


def main(url: str = "http://127.0.0.1:8000/v1", model: str | None = None) -> None:
    client = OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    model = model or client.models.list().data[0].id
    messages = [{"role": "user", "content": "What is the weather in Bonn?"}]
    answer = client.chat.completions.create(
        model=model, messages=messages, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
    )
    message = answer.choices[0].message
    messages.append(message.to_dict())
    for call in message.tool_calls:
        print(f"{call.function.name}({call.function.arguments})")
        result = get_weather(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    stream = client.chat.completions.create(
        model=model, messages=messages, tools=TOOLS, tool_choice="none", max_tokens=60, stream=True
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])
