"""Whether code that a configuration names can be found: rewards, tools, users, agents. It is read, never run."""

from __future__ import annotations

import ast
import importlib.util
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

from asyncrl.config import places
from asyncrl.config.problems import Problem
from asyncrl.config.schema import Config, ToolConfig

BUILTIN_TOOLS = ("calculator", "python", "search", "gsm8k")
BUILTIN_INTERACTIONS = ("scripted", "model", "retry", "reasoning_gym", "verifiers")


def conversation_problems(config: Config) -> Iterator[Problem]:
    """Of tools, interactions and the user's own agent."""
    turns, agent = config.rollout.multi_turn, config.rollout.agent
    if turns.enable:
        for number, tool in enumerate(turns.tools):
            yield from _tool(f"rollout.multi_turn.tools.{number}", tool)
        for number, interaction in enumerate(turns.interactions):
            key = f"rollout.multi_turn.interactions.{number}.class_name"
            yield from user_code(key, interaction.class_name, BUILTIN_INTERACTIONS, "interaction")
        counts = Counter(interaction.name for interaction in turns.interactions)
        for name in (name for name, count in counts.items() if count > 1):
            yield Problem(
                "rollout.multi_turn.interactions", name, "two have this name, so a row could choose neither",
                "give each a name of its own",
            )  # fmt: skip
    if agent.program is not None:
        yield from user_code("rollout.agent.program", agent.program, (), "function")
    if agent.command and shutil.which(agent.command[0]) is None:
        yield _no_program("rollout.agent.command", agent.command[0])


def _tool(key: str, tool: ToolConfig) -> Iterator[Problem]:
    given = [name for name in ("class_name", "function", "mcp") if getattr(tool, name) is not None]
    if len(given) != 1:
        yield Problem(
            key, ", ".join(given), "a tool is a class, a function or a server, and this is "
            f"{'none of them' if not given else 'more than one'}", "set exactly one of class_name, function and mcp",
        )  # fmt: skip
    elif tool.function is not None:
        yield from user_code(f"{key}.function", tool.function, (), "function")
    elif tool.class_name is not None:
        name = tool.class_name
        module, _, _ = name.rpartition(".")
        if ":" in name or not module or not importable(module):
            yield from user_code(f"{key}.class_name", name, BUILTIN_TOOLS, "tool")
    elif tool.mcp is not None:
        mcp = tool.mcp
        if bool(mcp.command) == (mcp.url is not None):
            told = "both are set" if mcp.command else "neither is set"
            yield Problem(f"{key}.mcp", mcp.url or "", f"a server is a command or a url, and {told}", "set exactly one")
        elif mcp.url is not None and not mcp.url.startswith(("http://", "https://")):
            yield Problem(
                f"{key}.mcp.url", mcp.url, "servers are spoken to over HTTP", "give http://... or https://..."
            )
        elif mcp.command and shutil.which(mcp.command[0]) is None:
            yield _no_program(f"{key}.mcp.command", mcp.command[0])


def _no_program(key: str, name: str) -> Problem:
    fix = "give a list, the program first and then its arguments" if " " in name else "check the name, or give a path"
    return Problem(key, name, "there is no such program on the PATH", fix)


def user_code(key: str, name: str, built_in: Sequence[str], what: str) -> Iterator[Problem]:
    """Whether there is a `module:name` or `path/file.py:name`, or a built-in of that name; nothing is imported."""
    place, _, attribute = name.rpartition(":")
    if not place:
        if name not in built_in:
            close = get_close_matches(name, built_in, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            known = f"Built in: {', '.join(built_in)}; your own" if built_in else "write it as"
            yield Problem(
                key, name, f"no built-in {what} has this name" if built_in else f"it names no {what}",
                f"{hint}{known}: module:name or path/file.py:name",
            )  # fmt: skip
    elif place.endswith(".py"):
        yield from _in_file(key, name, Path(place).expanduser(), attribute)
    elif not importable(place):
        yield Problem(
            key, name, f"there is no module {place} to import",
            "check the name, install it into this environment, or give path/file.py:name",
        )  # fmt: skip


def _in_file(key: str, name: str, file: Path, function: str) -> Iterator[Problem]:
    if not file.is_file():
        yield Problem(key, name, f"the file {file} is not there", places.like(file))
        return
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
    except (SyntaxError, ValueError) as error:
        yield Problem(key, name, f"{file} is not Python that compiles: {error}", "mend the file")
        return
    defined = {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    bound = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    imported = {a.asname or a.name for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom) for a in n.names}
    if function not in defined | bound | imported and "*" not in imported:
        close = get_close_matches(function, defined, n=1)
        names = ", ".join(sorted(defined)) or "nothing"
        fix = f"did you mean {close[0]}?" if close else f"it defines {names}"
        yield Problem(key, name, f"{file} has no {function!r}", fix)


def importable(module: str) -> bool:
    """Whether the top package of `module` is found; parents are not imported, so what lies below stays unchecked."""
    top = module.partition(".")[0]
    if not top.isidentifier():
        return False
    return (
        importlib.util.find_spec(top) is not None or (Path.cwd() / top).is_dir() or (Path.cwd() / f"{top}.py").is_file()
    )
