"""Converts images and videos between file bytes, pictures, and the features that a vision model's processor computes.

The stored bytes are sent unchanged, and Rollouter and Trainer call the same processor, so that engine and Trainer
see the same features. A video is a file with several pages in one of the `FORMATS` (GIF, WebP, PNG, TIFF); separate
frames are stored in a TIFF, which is lossless.

The bytes come from data sets, which are not trusted: other formats are not opened, because pillow's readers include
one that starts Ghostscript, and the sizes of all pages are added up before any page is decoded.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.assets import resolve
from asyncrl.config.sections.data import ModelConfig
from asyncrl.core.failures import ConfigError
from asyncrl.core.types import Media

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile
    from transformers import ProcessorMixin

MAX_MEDIA = 256
"""Limit for the images and videos of one prompt. Some processors compute 27 MB of features from an image, however
small it is."""
MAX_MEDIA_BYTES = 64 << 20
"""Limit for all media of one prompt, as stored."""
MAX_PIXELS = 1 << 27
"""Limit for all frames of all media of one prompt: 400 MB as RGB. A small file may decompress to pictures that exceed
the memory."""
MAX_FRAMES = 10_000
"""Limit for the frames of all videos of one prompt: each costs time and memory, however small it is."""
MAX_SCANS = 100
"""Limit for the scans of a JPEG, which have ten in ordinary files: for 30 bytes, each goes over all pixels."""
MAX_METADATA = 100
"""Limit for the Exif segments and the colour profiles of a file, which has one of each: a profile of 1 kB decompresses
to 1 MB, and pillow copies all earlier Exif data for each segment."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""The file formats that are read, by pillow's names."""
_JPEG_MARKER = re.compile(rb"\xff([\xc0-\xcf\xd9-\xfe])")
"""A marker with a segment, or that of the end. The others are no markers to libjpeg when it looks for the next scan."""


def frames_of(media: Media) -> list[Image]:
    """Decode the pictures in RGB: one, or a video's frames.

    Raises:
        ValueError: its format is not one of `FORMATS`, pillow cannot read it, or it is too large.
    """
    from PIL import Image, ImageSequence

    _check_repeats(media)
    try:
        with Image.open(io.BytesIO(media.data), formats=FORMATS) as opened:
            if media.kind == "video" and opened.format == "MPO":
                raise ValueError("it is a JPEG with several pictures, which is read as an image only")
            _check_size(opened, media.kind)
            if media.kind == "image":
                return [opened.convert("RGB")]
            return [page.convert("RGB") for page in ImageSequence.Iterator(opened)]
    except _TooLargeError:
        raise
    except Exception as error:  # pillow's readers raise errors of many types for damaged files
        readable = ", ".join(FORMATS)
        raise ValueError(f"pillow cannot read it as {readable}: {error}") from error


class _TooLargeError(ValueError):
    """A medium has too many pixels or frames."""


def _check_repeats(media: Media) -> None:
    """Count the parts of a file that take far more time to read than bytes. libtiff counts the scans in a TIFF."""
    scans = _num_scans(media.data) if media.data.startswith(b"\xff\xd8") else 0
    if scans > MAX_SCANS:
        raise _TooLargeError(f"it is a JPEG of more than {MAX_SCANS} scans, the limit")
    for name, mark in (("Exif segments", b"Exif\0\0"), ("colour profiles", b"iCCP")):
        if media.data.count(mark) > MAX_METADATA:
            raise _TooLargeError(f"it has more than {MAX_METADATA} {name}, the limit")


def _num_scans(data: bytes) -> int:
    """Return the number of scans of a JPEG up to its end, which other data may follow; counting stops at the limit."""
    scans = at = 0
    while scans <= MAX_SCANS and (marker := _JPEG_MARKER.search(data, at)) and marker[1] != b"\xd9":
        scans += marker[1] == b"\xda"
        at = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2], "big")
    return scans


def _check_size(opened: ImageFile, kind: str) -> None:
    """Add up the sizes of the pages, which may differ, without decoding them."""
    pixels = 0
    for page in count() if kind == "video" else range(1):
        try:
            opened.seek(page)
        except EOFError:
            break
        check_frames(page + 1)
        check_pixels(pixels := pixels + max(opened.width * opened.height, _tile_pixels(opened)))


def _tile_pixels(page: ImageFile) -> int:
    """Return the size of a tile of a TIFF as the number of RGB pixels that take as many bytes; otherwise 0.

    libtiff decodes a tile as a whole, however small the page is.
    """
    from PIL.TiffImagePlugin import BITSPERSAMPLE, SAMPLESPERPIXEL, TILELENGTH, TILEWIDTH, TiffImageFile

    if not isinstance(page, TiffImageFile):
        return 0
    width, height, samples = (page.tag_v2.get(tag, 0) for tag in (TILEWIDTH, TILELENGTH, SAMPLESPERPIXEL))
    if not (isinstance(width, int) and isinstance(height, int)):
        return 0
    bits = max(page.tag_v2.get(BITSPERSAMPLE, (1,)))
    return width * height * max(3, samples) * bits // 24


def check_pixels(pixels: int) -> None:
    """Raise `ValueError` if media with this many pixels are too large for one prompt."""
    if pixels > MAX_PIXELS:
        raise _TooLargeError(f"it has at least {pixels} pixels; {MAX_PIXELS} are allowed")


def check_frames(frames: int) -> None:
    """Raise `ValueError` if videos with this many frames are too long for one prompt."""
    if frames > MAX_FRAMES:
        raise _TooLargeError(f"it has more than {MAX_FRAMES} frames, the limit for the videos of a prompt")


def restrict_formats() -> None:
    """Let pillow open only `FORMATS` in this process, also for libraries that open files themselves, such as vLLM."""
    from PIL import Image

    Image.init()
    Image.ID[:] = FORMATS


def video_array(media: Media) -> NDArray[np.uint8]:
    """Return the frames as uint8 `[frames, height, width, 3]`. Raises as `frames_of` does."""
    return np.stack([np.asarray(frame) for frame in frames_of(media)])


def image_bytes(image: Image) -> bytes:
    """Encode as PNG, which is lossless."""
    written = io.BytesIO()
    image.convert("RGB").save(written, "PNG")
    return written.getvalue()


def video_bytes(frames: Sequence[Image]) -> bytes:
    """Encode as a TIFF with one page per frame: unlike animated formats, it does not merge identical frames."""
    written = io.BytesIO()
    first, *others = [frame.convert("RGB") for frame in frames]
    first.save(written, "TIFF", save_all=True, append_images=others, compression="tiff_deflate")
    return written.getvalue()


def digest(media: Media) -> str:
    """Return a hash of kind and bytes."""
    return hashlib.blake2b(media.data, digest_size=16, person=media.kind.encode()).hexdigest()


def join(media: Sequence[Media]) -> bytes:
    """Join any number of media into one byte string, which is empty for no media."""
    if not media:
        return b""
    header = json.dumps([(kind, len(data)) for kind, data in media]).encode()
    return b"".join([len(header).to_bytes(4, "little"), header, *(data for _, data in media)])


def split(joined: bytes) -> tuple[Media, ...]:
    """Split the byte string of `join`; zeros mean no media. Trailing bytes are ignored."""
    if not any(joined[:4]):
        return ()
    at = 4 + int.from_bytes(joined[:4], "little")
    media = []
    for kind, length in json.loads(joined[4:at]):
        media.append(Media(kind, joined[at : at + length]))
        at += length
    return tuple(media)


def load_processor(model: ModelConfig) -> ProcessorMixin | None:
    """Load the model's processor; None: the model takes text only.

    Raises:
        ConfigError: the processor cannot be loaded, for example because a package that it needs is missing.
    """
    from transformers import AutoConfig, AutoProcessor

    try:
        path, code = resolve(model.path), model.trust_remote_code
        if getattr(AutoConfig.from_pretrained(path, trust_remote_code=code), "vision_config", None) is None:
            return None
        processor = AutoProcessor.from_pretrained(path, trust_remote_code=code)
    except (OSError, ValueError, ImportError) as error:
        why = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigError.wrap(
            f"model.path={model.path}: the data has images or videos, but the processor cannot be loaded: {why}",
            error,
        ) from None
    return processor if getattr(processor, "image_processor", None) is not None else None


def takes_videos(processor: ProcessorMixin) -> bool:
    """Return whether the processor handles videos."""
    return getattr(processor, "video_processor", None) is not None


def placeholder(processor: ProcessorMixin, media: Media) -> str:
    """Return the placeholder text of the medium, which the processor repeats once per feature."""
    return str(getattr(processor, f"{media.kind}_token"))


def placeholder_ids(processor: ProcessorMixin) -> frozenset[int]:
    """Return the token ids that the model replaces by features."""
    names = ("image_token_id", "video_token_id")
    listed = [*getattr(processor, "image_token_ids", ()), *getattr(processor, "video_token_ids", ())]
    ids = [*(getattr(processor, name, None) for name in names), *listed]
    return frozenset(token for token in ids if isinstance(token, int))


def process(processor: ProcessorMixin, texts: Sequence[str], media: Sequence[Sequence[Media]]) -> Mapping[str, Any]:
    """Return `input_ids`, a list for each text with all its placeholders, and the features of all media as tensors.

    Each text has at least one medium.

    Raises:
        ValueError: a text has more or fewer placeholders than media, or a medium cannot be read.
    """
    inputs: dict[str, Any] = {}
    images = [[frames_of(one)[0] for one in each if one.kind == "image"] for each in media]
    videos = [video_array(one) for each in media for one in each if one.kind == "video"]
    if any(images):
        inputs |= {"images": images, "images_kwargs": {"return_tensors": "pt"}}
    if videos:
        inputs |= {"videos": videos, "videos_kwargs": {"return_tensors": "pt", "do_sample_frames": False}}
    result: Mapping[str, Any] = processor(text=list(texts), text_kwargs={"add_special_tokens": False}, **inputs)
    return result
