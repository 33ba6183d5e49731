"""`${…}` in values that depend on the environment, and the secrets in a configuration.

${oc.env:NAME}    is resolved when the configuration is composed; `Config.public_values` has it unresolved
${secret:NAME}    stays a reference in the configuration; `reveal` reads the variable where a process needs the value
plain text        is a secret by the name of its key, as a number is, too, or as a part of a URL (`secret_parts`);
                  `Config.public_values` has `HIDDEN` in its place
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from asyncrl.core.failures import SHORTEST_HIDDEN, ConfigError, hide

ValuePath = tuple[str | int, ...]
"""Keys and list indices that lead to a value."""

HIDDEN = "…"
"""Stands for a secret that the configuration contains as plain text."""
_REFERENCE = re.compile(r"\$\{secret:([A-Za-z_]\w*)\}", re.ASCII)
_INNERMOST = re.compile(r"\$\{(?!secret:)([^${}]*)\}")
"""A reference without references inside."""
_MAX_STEPS, _MAX_RESOLVED = 100, 100_000
"""Limits for the references and the characters of one resolved value."""
_MAX_REFERENCES = 200
"""Limit for the references that are resolved in a configuration, each as often as a value needs it. Recipes have 10."""
_SECRET_NAME = re.compile(
    r"SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|AUTHORIZATION|COOKIE|(TOKEN|KEY)$|(^|_)(TOKEN|KEY)_"
    r"|(^|_)(AUTH|BEARER|PWD|SIG|SIGNATURE)$",
    re.IGNORECASE,
)
_NOT_SECRET_NAME = re.compile(
    r"_(FILE|PATH|DIR|ENV|URL|NAME|IDS|LEN|LEVEL|MODE|SIZE|TYPE)$"
    r"|(PROMPT|QUESTION|ANSWER|SOLUTION|RESPONSE|TRUTH|MESSAGES|LABEL|TEXT|FN|INPUT|OUTPUT|IMAGE|VIDEO|AUDIO|SORT)_KEY$"
    r"|(BOS|EOS|PAD|UNK|SEP|CLS|MASK|STOP|START|END|THINK|IMAGE|VIDEO|AUDIO)_TOKEN$",
    re.IGNORECASE,
)
"""Names of files, columns and special tokens."""
_URL_PART = re.compile(r"(https?)?://([^/?#\s'\",]+)@|[?&]([\w.-]+)=([^&#\s'\"]+)", re.IGNORECASE)
"""Matches what may be a secret in a URL: the part before `@`, which over HTTP is one without a colon, too; and a
parameter with its name."""


# ------------------------------------------------------------------------------------------------ secrets


def secret_names(text: str) -> list[str]:
    """Return the variables that `${secret:NAME}` in `text` refers to."""
    return _REFERENCE.findall(text)


def looks_secret(name: str) -> bool:
    """Return whether a key or variable of this name usually has a secret: it contains TOKEN, KEY, SECRET, PASSWORD,
    CREDENTIAL, AUTHORIZATION or similar."""
    name = name.replace("-", "_")
    return bool(_SECRET_NAME.search(name)) and not _NOT_SECRET_NAME.search(name)


def secret_name(path: Iterable[str | int]) -> str:
    """Return the part of a path by which the values at and below it are secrets; "" if there is none."""
    return next((part for part in map(str, path) if looks_secret(part)), "")


def secret_parts(text: str, name: str = "") -> list[slice]:
    """Return where `text`, the value of the key `name`, has secrets in plain text: all of it because of the name, or
    credentials in URLs. References are no secrets."""
    if looks_secret(name):
        return [] if "${" in text or not text else [slice(0, len(text))]
    found = []
    for match in _URL_PART.finditer(text):
        group = 2 if match[2] else 4
        is_secret = (match[1] or ":" in match[2] or match[2] == HIDDEN) if match[2] else looks_secret(match[3])
        if is_secret and "${" not in match[group]:
            found.append(slice(*match.span(group)))
    return found


def reveal(value: Any, key: str) -> Any:
    """Return `value` (JSON types) with `${secret:NAME}` replaced by the variables' values, which errors then hide.

    Only the code that passes a value on to a program, a server or user code calls this function. The result must not
    be stored.

    Raises:
        ConfigError: a variable is not set, or empty; the message names it and `key`, the key of `value`.
    """
    if isinstance(value, str):
        return _REFERENCE.sub(lambda match: _read(match, key), value)
    if isinstance(value, Mapping):
        return {name: reveal(item, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, list | tuple) and any(secret_names(text) for _, text in texts(value)):
        return [reveal(item, f"{key}.{number}") for number, item in enumerate(value)]
    return value


def _read(reference: re.Match[str], key: str) -> str:
    value = os.environ.get(reference[1])
    if not value:
        raise ConfigError(
            f"{key} has {reference[0]}: the environment has no variable {reference[1]}, or it is empty. Export it "
            "where the run is started and, for a cluster at ray.address, on every node"
        )
    hide(value, reference[0])
    return value


def hide_secrets(value: Any) -> None:
    """Make the errors and logs of this process hide all secrets that `value` (JSON types) has or refers to."""
    for path, text in texts(value):
        for name in secret_names(text):
            hide(os.environ.get(name, ""), f"${{secret:{name}}}")
        for part in secret_parts(text, secret_name(path)):
            hide(text[part], HIDDEN)
            hide(re.split(r"[\s:]", text[part])[-1], HIDDEN)  # of `user:password`, or `Bearer token`


def texts(value: Any, path: ValuePath = ()) -> Iterator[tuple[ValuePath, str]]:
    """Yield the texts in `value` (JSON types), and its numbers that are secrets as texts, with their paths."""
    value = _as_text(value, secret_name(path))
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from texts(item, (*path, str(name)))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from texts(item, (*path, number))


def without_secrets(value: Any, name: str = "", *, digests: bool = False) -> Any:
    """Return `value` (JSON types) with `HIDDEN` in place of each secret in plain text (`secret_parts`) and each number
    at or below a key with the name of a secret.

    Args:
        name: the name by which the value may be a secret; the keys inside have names of their own.
        digests: append a digest to each text with a secret, by which two values are compared.
    """
    if isinstance(value, Mapping):
        return {
            key: without_secrets(item, name if looks_secret(name) else str(key), digests=digests)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [without_secrets(item, name, digests=digests) for item in value]
    value = _as_text(value, name)
    if not isinstance(value, str):
        return value
    shown = value
    for part in reversed(secret_parts(value, name)):
        shown = f"{shown[: part.start]}{HIDDEN}{shown[part.stop :]}"
    return with_digest(shown, value) if digests and shown != value else shown


def _as_text(value: Any, name: str) -> Any:
    """Return a number that is a secret by the key `name`, such as a PIN, as its text; other values as they are."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number and looks_secret(name) else value


def with_digest(shown: str, text: str) -> str:
    """Return `shown`, which stands for `text`, with a digest of `text`."""
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    return f"{shown} (sha256:{digest[:16]})"


# ------------------------------------------------------------------------------------------------ resolution


class ReadVariables:
    """The values of the environment variables that `${oc.env:NAME}` has read."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.reads = 0

    def env(self, *arguments: Any) -> str | None:
        """OmegaConf's resolver `oc.env`, which also records the variable."""
        from omegaconf.resolvers import oc

        value: str | None = oc.env(*arguments)
        if arguments[0] in os.environ:
            self.values[arguments[0]] = os.environ[arguments[0]]
            self.reads += 1
        return value

    def hidden(self, value: Any) -> Any:
        """Return `value` (JSON types) with the variables' values replaced by references, for messages."""
        if isinstance(value, str):
            for name, found in sorted(self.values.items(), key=lambda item: -len(item[1])):
                if len(found) >= SHORTEST_HIDDEN:
                    value = value.replace(found, f"${{oc.env:{name}}}")
            return value
        if isinstance(value, Mapping):
            return {key: self.hidden(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.hidden(item) for item in value]
        return value


@contextmanager
def resolvers() -> Iterator[ReadVariables]:
    """Register `secret`, and `oc.env` with a record of the variables that it reads, for the block."""
    from omegaconf import OmegaConf
    from omegaconf.resolvers import oc

    read = ReadVariables()
    OmegaConf.register_new_resolver("secret", _keep_reference, replace=True)
    OmegaConf.register_new_resolver("oc.env", read.env, replace=True)
    try:
        with bounded_references():
            yield read
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


@contextmanager
def bounded_references(most: int = _MAX_REFERENCES) -> Iterator[None]:
    """Limit the references that OmegaConf resolves in the block, and the length of resolved values.

    It resolves a value once for each reference to it, so a few values that refer to each other several times would take
    hours.

    Beyond a limit, OmegaConf raises an `InterpolationResolutionError`.
    """
    from omegaconf.base import Container
    from omegaconf.errors import InterpolationResolutionError

    resolve, count = Container.resolve_parse_tree, 0

    def counted(container: Container, /, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count > most:
            raise InterpolationResolutionError(f"more than {most} references ${{...}} have to be resolved")
        value = resolve(container, *args, **kwargs)
        if isinstance(value, str) and len(value) > _MAX_RESOLVED:
            raise InterpolationResolutionError(f"a resolved value has more than {_MAX_RESOLVED} characters")
        return value

    Container.resolve_parse_tree = counted
    try:
        yield
    finally:
        Container.resolve_parse_tree = resolve


def _keep_reference(name: Any) -> str:
    if not _REFERENCE.fullmatch(reference := f"${{secret:{name}}}"):
        raise ValueError(f"{name!r} is not the name of an environment variable; write ${{secret:NAME}}")
    return reference


def texts_from_environment(node: Any, read: ReadVariables) -> dict[ValuePath, str]:
    """Return the texts as they were given, such as `${oc.env:HOME}/data`, by the paths of texts and collections that
    depend on the environment.

    Args:
        node: an OmegaConf container that can be resolved.
        read: the record of the current `resolvers`.
    """
    from omegaconf import OmegaConf

    def walk(node: Any, given: Any, path: ValuePath) -> Iterator[tuple[ValuePath, str]]:
        for key, text in given.items() if isinstance(given, dict) else enumerate(given):
            here = (*path, key if isinstance(given, list) else str(key))
            if isinstance(text, dict | list):
                yield from walk(node[key], text, here)
            elif isinstance(text, str) and "${" in text:
                before, value = read.reads, node[key]
                if OmegaConf.is_config(value):
                    value = OmegaConf.to_container(value, resolve=True)
                if read.reads > before and isinstance(value, str | dict | list):
                    yield here, text

    return dict(walk(node, OmegaConf.to_container(node, resolve=False), ()))


def resolved(tree: Mapping[str, Any], keys: Sequence[str]) -> Any:
    """Return the value at `keys` in `tree`, a written configuration, with this process's environment.

    Anybody may have written it, so the work is bounded, unlike OmegaConf's. The value stays unresolved if a variable is
    not set, a reference leads to a list or mapping or names another resolver, or it needs more than `_MAX_STEPS` steps.
    """
    found: Any = tree
    for key in keys:
        found = found[key]
    text = found
    for _ in range(_MAX_STEPS):
        if not isinstance(text, str) or (match := _INNERMOST.search(text)) is None:
            return text
        value = _referred(tree, match[1])
        if value is None or isinstance(value, Mapping | list) or len(text) > _MAX_RESOLVED:
            break
        text = value if match[0] == text else f"{text[: match.start()]}{value}{text[match.end() :]}"
    return found


def _referred(tree: Mapping[str, Any], reference: str) -> Any:
    """Return what `${reference}` stands for, or None if it has no value here."""
    if reference.startswith("oc.env:"):
        name, _, default = reference.removeprefix("oc.env:").partition(",")
        return os.environ.get(name.strip(), default.strip(" \"'") or None)
    found: Any = tree
    for key in reference.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found
