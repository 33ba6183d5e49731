"""Tools that the model may call. Write your own with `BaseTool` or `function_tool`; see docs/agents.md."""

from rollouter.tools.base import BadArgumentsError, BaseTool, ToolContext, ToolError, ToolResponse
from rollouter.tools.function import function_tool

__all__ = ["BadArgumentsError", "BaseTool", "ToolContext", "ToolError", "ToolResponse", "function_tool"]
