"""Images and videos as the bytes of files, and as pictures again.

Bytes travel as they were stored, so that engine and Trainer decode the same. A video is any file with several pages
that pillow reads (animated GIF, WebP, PNG, TIFF); frames that come one by one are put into a TIFF, which loses none.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from asyncrl.types import Media

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_MEDIA_BYTES = 64 << 20
"""Of all media of one prompt, as stored."""
MAX_PIXELS = 1 << 27
"""Of one medium, all frames together: 400 MB as RGB. Small files may hold pictures that no memory can."""


def frames_of(media: Media) -> list[Image]:
    """Its pictures in RGB: one, or a video's frames.

    Raises:
        ValueError: pillow cannot read it, or it is too large.
    """
    from PIL import Image, ImageSequence

    try:
        with Image.open(io.BytesIO(media.data)) as opened:
            pages = getattr(opened, "n_frames", 1) if media.kind == "video" else 1
            if (pixels := opened.width * opened.height * pages) > MAX_PIXELS:
                raise ValueError(f"it has {pixels} pixels; {MAX_PIXELS} are allowed")
            if media.kind == "image":
                return [opened.convert("RGB")]
            return [page.convert("RGB") for page in ImageSequence.Iterator(opened)]
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"pillow cannot read it: {error}") from error


def video_array(media: Media) -> NDArray[np.uint8]:
    """uint8 `[frames, height, width, 3]`. Raises as `frames_of` does."""
    return np.stack([np.asarray(frame) for frame in frames_of(media)])


def image_bytes(image: Image) -> bytes:
    """As PNG, which loses nothing."""
    written = io.BytesIO()
    image.convert("RGB").save(written, "PNG")
    return written.getvalue()


def video_bytes(frames: Sequence[Image]) -> bytes:
    """As a TIFF of one page a frame: unlike animated formats it keeps frames that are alike apart."""
    written = io.BytesIO()
    first, *others = [frame.convert("RGB") for frame in frames]
    first.save(written, "TIFF", save_all=True, append_images=others, compression="tiff_deflate")
    return written.getvalue()


def digest(media: Media) -> str:
    """The same for the same bytes."""
    return hashlib.blake2b(media.data, digest_size=16, person=media.kind.encode()).hexdigest()


def join(media: Sequence[Media]) -> bytes:
    """Any number of them as one piece of bytes; none: no bytes."""
    if not media:
        return b""
    header = json.dumps([(kind, len(data)) for kind, data in media]).encode()
    return b"".join([len(header).to_bytes(4, "little"), header, *(data for _, data in media)])


def split(joined: bytes) -> tuple[Media, ...]:
    """What `join` was given; of zeros: nothing. Bytes behind its end don't matter."""
    if not any(joined[:4]):
        return ()
    at = 4 + int.from_bytes(joined[:4], "little")
    media = []
    for kind, length in json.loads(joined[4:at]):
        media.append(Media(kind, joined[at : at + length]))
        at += length
    return tuple(media)
