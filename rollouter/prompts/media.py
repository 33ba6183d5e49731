"""Finds images and videos in the rows of the data set, reads and checks them, and encodes them for the model.

    row ─▶ messages with parts {"type": "image" | "video"}, and their bytes ─▶ tokens

A row may use OpenAI's content parts (`image`, `image_url`, `video`, `video_url`), or verl's columns `images` and
`videos` with `<image>` and `<video>` in the text. Media are never fetched from the network.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import numpy as np

from asyncrl.config.sections.data import ModelConfig
from asyncrl.core.failures import DataError
from asyncrl.core.types import Media
from asyncrl.storage.media import (
    MAX_MEDIA,
    MAX_MEDIA_BYTES,
    check_frames,
    check_pixels,
    digest,
    frames_of,
    image_bytes,
    load_processor,
    process,
    takes_videos,
    video_bytes,
)

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

Kind = Literal["image", "video"]
Message = Mapping[str, Any]

_PARTS: Mapping[str, tuple[Kind, str]] = {
    "image": ("image", "image"),
    "image_url": ("image", "image_url"),
    "video": ("video", "video"),
    "video_url": ("video", "video_url"),
}
"""For each type of part, the kind of the medium and the key under which the part contains it."""
_PLACE = re.compile(r"(<image>|<video>)")
_NPY = b"\x93NUMPY"


class MessagesWithMedia(NamedTuple):
    """Messages whose parts refer to media by name, and the media themselves."""

    messages: tuple[Message, ...]
    media: tuple[Media, ...]
    """In the order of their parts."""


def has_media(row: Mapping[str, Any], messages: Sequence[Message]) -> bool:
    """Return whether the row contains images or videos."""
    columns = any(_is_some(row.get(column)) for column in ("images", "videos"))
    return columns or any(True for _ in _media_parts(messages))


def _media_parts(messages: Sequence[Message]) -> Iterator[Mapping[str, Any]]:
    for message in messages:
        if isinstance(message["content"], list | tuple | np.ndarray):
            for part in message["content"]:
                if isinstance(part, Mapping) and isinstance(part.get("type"), str) and part["type"] in _PARTS:
                    yield part


def extract(
    row: Mapping[str, Any], messages: Sequence[Message], directory: Path | None, where: str, *, checked: bool = False
) -> MessagesWithMedia:
    """Read the media of a row. Paths are relative to `directory`; `checked` media are not decoded again.

    Raises:
        DataError: a medium is malformed, unreadable, too large or on the network, there are too many of them, or the
            text and the columns do not contain the same number of media.
    """
    items = {kind: _items(row, f"{kind}s", where) for kind in ("image", "video")}
    if (number := sum(map(len, items.values())) + sum(1 for _ in _media_parts(messages))) > MAX_MEDIA:
        raise DataError(
            f"{where}: the prompt has {number} images and videos; {MAX_MEDIA} are allowed. Give fewer, or take the row "
            "out"
        )
    columns = {kind: iter(values) for kind, values in items.items()}
    media: list[Media] = []
    size = pixels = num_frames = 0

    def parts(content: Any, field: str) -> Iterator[Mapping[str, Any]]:
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list | tuple | np.ndarray):
            raise DataError(f"{where}: field '{field}' is {type(content).__name__}; expected a text or a list of parts")
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
                raise DataError(f"{at}: the text has more {piece} than the column '{kind}s' has items")
            yield add(kind, item, f"{where}: field '{kind}s'")

    def add(kind: Kind, value: Any, at: str) -> Mapping[str, Any]:
        nonlocal size, pixels, num_frames
        try:
            one, name = _read(kind, value, directory)
            if not checked and len(one.data) <= MAX_MEDIA_BYTES:
                frames = frames_of(one)
                pixels += sum(frame.width * frame.height for frame in frames)
                check_pixels(pixels)
                num_frames += len(frames) if kind == "video" else 0
                check_frames(num_frames)
        except (ValueError, TypeError, OSError, MemoryError) as error:
            raise DataError(f"{at}: the value is not a valid {kind}: {error}") from error
        media.append(one)
        size += len(one.data)
        if size > MAX_MEDIA_BYTES:
            raise DataError(f"{at}: the row's media have at least {size} bytes; {MAX_MEDIA_BYTES} are allowed")
        return {"type": kind, kind: name or f"blake2b:{digest(one)}"}

    given = any(_is_some(row.get(column)) for column in ("images", "videos"))
    found = tuple(
        {**message, "content": list(parts(message["content"], f"prompt[{place}].content"))}
        for place, message in enumerate(messages)
    )
    for kind, rest in columns.items():
        if next(rest, None) is not None:
            raise DataError(f"{where}: the column '{kind}s' has more items than the prompt has <{kind}>")
    return MessagesWithMedia(found, tuple(media))


def _is_some(value: Any) -> bool:
    return value is not None and not (hasattr(value, "__len__") and len(value) == 0)


def _items(row: Mapping[str, Any], column: str, where: str) -> Sequence[Any]:
    value = row.get(column)
    if value is None:
        return ()
    if not isinstance(value, list | tuple | np.ndarray):
        raise DataError(f"{where}: field '{column}' is {type(value).__name__}; expected a list")
    return list(value)


def _read(kind: Kind, value: Any, directory: Path | None) -> tuple[Media, str]:
    """Return the medium and its name, which is its path as written, or "" without a path.

    Raises:
        ValueError, TypeError, OSError: the value contains no readable medium.
    """
    if isinstance(value, Mapping):
        value = next((value[key] for key in ("bytes", "url", "path", kind) if value.get(key) is not None), None)
    data, name = _of_text(value, directory) if isinstance(value, str) else (_of_object(kind, value), "")
    if kind == "video" and data.startswith(_NPY):
        data = video_bytes(_images_of(_array_of(data)))
    return Media(kind, data), name


def _array_of(npy: bytes) -> np.ndarray:
    try:
        array: np.ndarray = np.load(io.BytesIO(npy), allow_pickle=False)
    except Exception as error:  # numpy parses the header as Python: errors of many types for damaged files
        raise ValueError(f"numpy cannot read it: {str(error)[:200]}") from error
    return array


def _of_text(text: str, directory: Path | None) -> tuple[bytes, str]:
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
        raise ValueError(f"{text[:80]!r} is on the network, but nothing is fetched; give a file or its bytes")
    path = Path(text.removeprefix("file://"))
    path = path if path.is_absolute() or directory is None else directory / path
    if path.exists() and not path.is_file():  # to open a pipe could block forever
        raise ValueError(f"{text[:80]!r} is not a regular file")
    with path.open("rb") as file:
        return file.read(MAX_MEDIA_BYTES + 1), text


def _of_object(kind: Kind, value: Any) -> bytes:
    from PIL.Image import Image

    if isinstance(value, bytes):
        return value
    if kind == "image" and isinstance(value, Image):
        return image_bytes(value)
    if kind == "video" and isinstance(value, np.ndarray) and value.ndim == 4:
        return video_bytes(_images_of(value))
    if kind == "video" and isinstance(value, list | tuple | np.ndarray) and len(value):
        return video_bytes(_frames(value))
    raise TypeError(f"it is {'missing' if value is None else type(value).__name__}")


def _frames(frames: Sequence[Any] | np.ndarray) -> list[Image]:
    """Convert the frames of a list, and stop at the limit of `check_pixels`."""
    check_frames(len(frames))
    images: list[Image] = []
    pixels = 0
    for frame in frames:
        images.append(_frame(frame))
        check_pixels(pixels := pixels + images[-1].width * images[-1].height)
    return images


def _frame(frame: Any) -> Image:
    """Convert one frame of a list, which may be an image, its bytes, or a uint8 array `[height, width, 3]`."""
    if isinstance(frame, np.ndarray):
        return _images_of(frame[None])[0]
    return frames_of(Media("image", _of_object("image", frame)))[0]


def _images_of(frames: np.ndarray) -> list[Image]:
    from PIL import Image

    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or not len(frames):
        raise ValueError(f"frames are {frames.dtype} {list(frames.shape)}; expected uint8 [frames, height, width, 3]")
    check_frames(len(frames))
    check_pixels(frames.size // 3)
    return [Image.fromarray(frame) for frame in frames]


class VisionEncoder:
    """Encodes prompts with media for the model. The first row with media loads the processor.

    The processor writes as many placeholders for an image as the model computes features. A model without video
    support gets the frames of a video as images.
    """

    def __init__(self, model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._model = model
        self._tokenizer = tokenizer

    @cached_property
    def _processor(self) -> ProcessorMixin | None:
        processor = load_processor(self._model)
        if processor is not None:
            processor.tokenizer = self._tokenizer  # use the run's tokenizer
        return processor

    def fitted(self, found: MessagesWithMedia, where: str) -> MessagesWithMedia:
        """Convert messages and media to the kinds that this model accepts; videos become frames if necessary.

        Raises:
            DataError: the model accepts text only, or the videos have too many frames for a model of images.
            ConfigError: the model's processor cannot be loaded.
        """
        processor = self._processor
        if processor is None:
            raise DataError(
                f"{where}: it has images or videos, and the model of model.path={self._model.path} takes text only; "
                "give a vision-language model, or take the row out"
            )
        if takes_videos(processor) or all(one.kind == "image" for one in found.media):
            return found
        media = iter(found.media)
        frames: list[Media] = []

        def parts(content: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
            fitted: list[Mapping[str, Any]] = []
            for part in content:
                if part["type"] == "text":
                    fitted.append(part)
                    continue
                one = next(media)
                pictures = frames_of(one) if one.kind == "video" else []
                if (number := len(frames) + len(pictures)) > MAX_MEDIA:
                    raise DataError(
                        f"{where}: this model takes the frames of videos as images, and the prompt has at least "
                        f"{number}; {MAX_MEDIA} are allowed. Give fewer frames, or take the row out"
                    )
                images = [Media("image", image_bytes(each)) for each in pictures] if one.kind == "video" else [one]
                frames.extend(images)
                fitted += [{"type": "image", "image": part[one.kind]}] * len(images)
            return fitted

        messages = tuple({**message, "content": parts(message["content"])} for message in found.messages)
        return MessagesWithMedia(messages, tuple(frames))

    def encode(self, text: str, media: Sequence[Media], where: str) -> list[int]:
        """Tokenize rendered text with all placeholders.

        Raises:
            DataError: the template has dropped media, or the processor refuses them.
        """
        assert self._processor is not None, "media were fitted"
        try:
            ids: list[int] = process(self._processor, [text], [media])["input_ids"][0]
        except (ValueError, IndexError, StopIteration, TypeError) as error:
            raise DataError.wrap(
                f"{where}: the model's processor refuses the prompt with its {len(media)} images or videos: {error}",
                error,
            ) from error
        return ids
