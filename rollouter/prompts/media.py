"""Images and videos of the data set: found in a row, read and checked.

    row ─▶ messages with parts {"type": "image" | "video"}, and the bytes of these ─▶ tokens (`rollouter.vision`)

Accepted are OpenAI's content parts (`image`, `image_url`, `video`, `video_url`), and verl's columns `images` and
`videos` with `<image>` and `<video>` in the text. Nothing is fetched from the network.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import numpy as np

from asyncrl.failures import DataError
from asyncrl.media import MAX_MEDIA_BYTES, MAX_PIXELS, digest, frames_of, image_bytes, video_bytes
from asyncrl.types import Media

if TYPE_CHECKING:
    from PIL.Image import Image

Kind = Literal["image", "video"]
Message = Mapping[str, Any]

_PARTS: Mapping[str, tuple[Kind, str]] = {
    "image": ("image", "image"),
    "image_url": ("image", "image_url"),
    "video": ("video", "video"),
    "video_url": ("video", "video_url"),
}
"""Types of parts: what it is, and the key that has it."""
_PLACE = re.compile(r"(<image>|<video>)")
_NPY = b"\x93NUMPY"


class WithMedia(NamedTuple):
    """Messages whose media are parts that only name them, and the media."""

    messages: tuple[Message, ...]
    media: tuple[Media, ...]
    """In the order of their parts."""


def has_media(row: Mapping[str, Any], messages: Sequence[Message]) -> bool:
    """Whether there is anything to do for `extract`."""
    columns = any(_is_some(row.get(column)) for column in ("images", "videos"))
    return columns or any(
        isinstance(part, Mapping) and part.get("type") in _PARTS
        for message in messages
        if isinstance(message["content"], list | tuple | np.ndarray)
        for part in message["content"]
    )


def extract(
    row: Mapping[str, Any], messages: Sequence[Message], directory: Path | None, where: str, *, seen: bool = False
) -> WithMedia:
    """Read the media of a row.

    Args:
        directory: Of the data file; paths are relative to it.
        seen: They were read before, and need not be decoded to see whether they can be.

    Raises:
        DataError: what is there is none, cannot be read, is too large, or lies on the network; or placeholders in the
            text are not as many as the columns have.
    """
    reader = _Reader(directory, seen)
    columns = {kind: iter(_items(row, f"{kind}s", where)) for kind in ("image", "video")}
    media: list[Media] = []

    def parts(content: Any, field: str) -> Iterator[Mapping[str, Any]]:
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        for number, part in enumerate(content):
            at = f"{where}: field '{field}[{number}]'"
            if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
                raise DataError(f"{at} is {type(part).__name__}; expected a part with a 'type'")
            if part["type"] == "text":
                yield from of_text(str(part.get("text") or ""), at)
            elif part["type"] in _PARTS:
                kind, key = _PARTS[part["type"]]
                yield add(kind, part.get(key), at)
            else:
                raise DataError(f"{at} has the type {part['type']!r}; known are text, {', '.join(_PARTS)}")

    def of_text(text: str, at: str) -> Iterator[Mapping[str, Any]]:
        if not given:
            yield {"type": "text", "text": text}
            return
        for piece in filter(None, _PLACE.split(text)):
            if not _PLACE.fullmatch(piece):
                yield {"type": "text", "text": piece}
                continue
            kind = cast(Kind, piece[1:-1])
            if (item := next(columns[kind], None)) is None:
                raise DataError(f"{at}: it has more {piece} than the column '{kind}s' has items")
            yield add(kind, item, f"{where}: field '{kind}s'")

    def add(kind: Kind, value: Any, at: str) -> Mapping[str, Any]:
        try:
            one, name = reader.read(kind, value)
        except (ValueError, TypeError, OSError) as error:
            raise DataError(f"{at}: no {kind} can be made of it: {error}") from error
        media.append(one)
        if (total := sum(len(each.data) for each in media)) > MAX_MEDIA_BYTES:
            raise DataError(f"{at}: the row's media have {total} bytes by now; {MAX_MEDIA_BYTES} are allowed")
        return {"type": kind, kind: name}

    given = any(_is_some(row.get(column)) for column in ("images", "videos"))
    found = tuple(
        {**message, "content": list(parts(message["content"], f"prompt[{place}].content"))}
        for place, message in enumerate(messages)
    )
    for kind, rest in columns.items():
        if next(rest, None) is not None:
            raise DataError(f"{where}: the column '{kind}s' has more items than the prompt has <{kind}>")
    return WithMedia(found, tuple(media))


def _is_some(value: Any) -> bool:
    return value is not None and not (hasattr(value, "__len__") and len(value) == 0)


def _items(row: Mapping[str, Any], column: str, where: str) -> Sequence[Any]:
    value = row.get(column)
    if value is None:
        return ()
    if not isinstance(value, list | tuple | np.ndarray):
        raise DataError(f"{where}: field '{column}' is {type(value).__name__}; expected a list")
    return list(value)


class _Reader:
    """From what a row has to bytes that pillow reads."""

    def __init__(self, directory: Path | None, seen: bool) -> None:
        self._directory = directory
        self._seen = seen

    def read(self, kind: Kind, value: Any) -> tuple[Media, str]:
        """The medium, and what people call it: its path as written, or its digest.

        Raises:
            ValueError, TypeError, OSError: there is none in it.
        """
        if isinstance(value, Mapping):
            value = next((value[key] for key in ("bytes", "url", "path", kind) if value.get(key) is not None), None)
        if isinstance(value, str):
            data, name = self._of_text(value)
        else:
            data, name = _of_object(kind, value), ""
        if kind == "video" and data.startswith(_NPY):
            data = _of_frames(data)
        media = Media(kind, data)
        if not self._seen and len(data) <= MAX_MEDIA_BYTES:
            frames_of(media)
        return media, name or f"blake2b:{digest(media)}"

    def _of_text(self, text: str) -> tuple[bytes, str]:
        scheme = text.partition(":")[0].lower() if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:", text) else ""
        if scheme == "data":
            head, comma, body = text.partition(",")
            if not comma or not head.endswith(";base64"):
                raise ValueError("a data URL has to be data:…;base64,…")
            try:
                return base64.b64decode(body, validate=True), ""
            except binascii.Error as error:
                raise ValueError(f"its base64 is damaged: {error}") from error
        if scheme not in ("", "file"):
            raise ValueError(f"{text[:80]!r} lies on the network, and nothing is fetched; give a file or its bytes")
        path = Path(text.removeprefix("file://"))
        path = path if path.is_absolute() or self._directory is None else self._directory / path
        with path.open("rb") as file:
            return file.read(MAX_MEDIA_BYTES + 1), text


def _of_object(kind: Kind, value: Any) -> bytes:
    from PIL.Image import Image

    if isinstance(value, bytes):
        return value
    if kind == "image" and isinstance(value, Image):
        return image_bytes(value)
    if kind == "video" and isinstance(value, np.ndarray) and value.ndim == 4:
        return video_bytes(_pictures(value))
    if kind == "video" and isinstance(value, list | tuple | np.ndarray) and len(value):
        return video_bytes([_picture(frame) for frame in value])
    raise TypeError(f"it is {'missing' if value is None else type(value).__name__}")


def _picture(frame: Any) -> Image:
    """One frame of a list: a picture, bytes of one, or uint8 `[height, width, 3]`."""
    if isinstance(frame, np.ndarray):
        return _pictures(frame[None])[0]
    return frames_of(Media("image", _of_object("image", frame)))[0]


def _of_frames(npy: bytes) -> bytes:
    return video_bytes(_pictures(np.load(io.BytesIO(npy), allow_pickle=False)))


def _pictures(frames: np.ndarray) -> list[Image]:
    from PIL import Image

    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or not len(frames):
        raise ValueError(f"frames are {frames.dtype} {list(frames.shape)}; expected uint8 [frames, height, width, 3]")
    if frames.size > 3 * MAX_PIXELS:
        raise ValueError(f"it has {frames.size // 3} pixels; {MAX_PIXELS} are allowed")
    return [Image.fromarray(frame) for frame in frames]
