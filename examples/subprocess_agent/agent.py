"""An agent program that reads its task from standard input and uses the run's endpoint over HTTP.

It needs only Python's standard library; an agent program may be written in any language.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request

BASE_URL = os.environ["OPENAI_BASE_URL"]
MAX_TURNS = 3
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calc",
            "description": "Work out an arithmetic expression.",
            "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
        },
    }
]


def main() -> None:
    task = json.load(sys.stdin)
    messages = task["messages"]
    answer = None
    for _ in range(MAX_TURNS):
        try:
            completion = post("chat/completions", {"model": task["model"], "messages": messages, "tools": TOOLS})
        except urllib.error.HTTPError as error:
            if error.code != 400 or b"context_length_exceeded" not in error.read():
                raise
            break  # the model has used up its tokens without an answer
        message = completion["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            answer = message["content"]
            break
        for call in message["tool_calls"]:
            result = calculate(call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    post("reward", {"reward": float(answer == task["ground_truth"]), "done": True})


def post(path: str, body: dict) -> dict:
    request = urllib.request.Request(
        f"{BASE_URL}/{path}",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def calculate(arguments: str) -> str:
    """Return the product, sum or difference of two numbers, or `error`."""
    try:
        x = json.loads(arguments)["x"]
        for sign, result in (("*", int.__mul__), ("+", int.__add__), ("-", int.__sub__)):
            left, found, right = x.partition(sign)
            if found:
                return str(result(int(left), int(right)))
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    return "error"


if __name__ == "__main__":
    main()
