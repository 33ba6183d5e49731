"""Images and videos of the data set: accepted forms, messages for refused ones, and tokens."""

from __future__ import annotations

import base64
import io
import json
import os
import struct
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoProcessor

from asyncrl.config.schema import Config
from asyncrl.config.sections.data import DataConfig, ModelConfig
from asyncrl.core.failures import ConfigError, DataError
from asyncrl.core.types import Media, Prompt, SampleId
from asyncrl.storage import media as stored_media
from asyncrl.storage.media import digest, frames_of, image_bytes, video_array, video_bytes
from rollouter.prompts import media as media_module
from rollouter.prompts.chat_template import load_tokenizer
from rollouter.prompts.dataset import PromptRow, parse_row
from rollouter.prompts.source import load_prompts
from tests.fakes.vision_model import FEATURES, picture, png, write_vision_model

PNG = png(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return ModelConfig(path=str(write_vision_model(tmp_path_factory.mktemp("vision"))))


def parse(prompt: Any, directory: Path | None = None, **columns: Any) -> PromptRow:
    return parse_row({"prompt": prompt, **columns}, "data.jsonl, line 3", directory=directory)


def of_part(part: Any, directory: Path | None = None) -> PromptRow:
    return parse([{"role": "user", "content": [{"type": "text", "text": "what is "}, part]}], directory)


def gif(*seeds: int) -> bytes:
    written = io.BytesIO()
    first, *others = [picture(seed) for seed in seeds]
    first.save(written, "GIF", save_all=True, append_images=others)
    return written.getvalue()


# ------------------------------------------------------------------------------------------------ accepted forms


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "pictures/one.png"},
        {"type": "image", "image": {"path": "pictures/one.png"}},
        {"type": "image", "image": {"bytes": PNG, "path": None}},
        {"type": "image", "image": PNG, "text": None},
        {"type": "image_url", "image_url": {"url": "pictures/one.png"}},
        {"type": "image_url", "image_url": "pictures/one.png"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(PNG).decode()}},
    ],
)
def test_an_image_keeps_its_stored_bytes(tmp_path: Path, part: Mapping[str, Any]) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "one.png").write_bytes(PNG)
    row = of_part(part, tmp_path)
    assert row.media == (Media("image", PNG),)
    text, image = row.messages[0]["content"]
    assert text == {"type": "text", "text": "what is "}
    assert image["type"] == "image" and image["image"] in ("pictures/one.png", f"blake2b:{digest(row.media[0])}")
    json.dumps(row.messages)


def test_file_urls_and_absolute_paths_are_not_relative_to_the_data(tmp_path: Path) -> None:
    (file := tmp_path / "one.png").write_bytes(PNG)
    for name in (str(file), f"file://{file}"):
        assert of_part({"type": "image", "image": name}, Path("/nowhere")).media == (Media("image", PNG),)


def test_an_image_object_becomes_a_png() -> None:
    (one,) = of_part({"type": "image", "image": picture(1)}).media
    assert (np.asarray(frames_of(one)[0]) == np.asarray(picture(1))).all()


def test_verls_columns_replace_the_placeholders_in_the_text() -> None:
    prompt = [{"role": "system", "content": "look"}, {"role": "user", "content": "<image>is it <image> or\n<video>?"}]
    row = parse(prompt, images=[{"bytes": PNG}, png(2)], videos=[gif(3, 4)])
    assert [one.kind for one in row.media] == ["image", "image", "video"]
    assert row.media[1].data == png(2)
    assert [part.get("text", part["type"]) for part in row.messages[1]["content"]] == [
        "image", "is it ", "image", " or\n", "video", "?",
    ]  # fmt: skip
    assert row.messages[0]["content"] == [{"type": "text", "text": "look"}]


def test_without_columns_placeholders_are_plain_text() -> None:
    row = parse([{"role": "user", "content": "what does <image> mean?"}], images=None)
    assert row.messages[0]["content"] == "what does <image> mean?" and row.media == ()
    content = [{"type": "text", "text": "a <image> tag, and "}, {"type": "image", "image": PNG}]
    row = parse([{"role": "user", "content": content}])
    assert row.messages[0]["content"][0]["text"] == "a <image> tag, and " and len(row.media) == 1


def test_contents_that_have_only_text_parts_are_unchanged() -> None:
    content = [{"type": "text", "text": "hello", "more": 1}]
    assert parse([{"role": "user", "content": content}]).messages[0]["content"] is content


@pytest.mark.parametrize(
    "video",
    [
        gif(1, 2, 3),
        [picture(1), picture(2), picture(3)],
        [png(1), png(2), png(3)],
        np.stack([np.asarray(picture(seed)) for seed in (1, 2, 3)]),
        "clip.npy",
    ],
)
def test_a_video_is_its_frames(tmp_path: Path, video: Any) -> None:
    frames = np.stack([np.asarray(picture(seed)) for seed in (1, 2, 3)])
    np.save(tmp_path / "clip.npy", frames)
    (one,) = of_part({"type": "video", "video": video}, tmp_path).media
    assert one.kind == "video" and video_array(one).shape == frames.shape
    if not isinstance(video, bytes):  # a GIF has only 256 colours
        assert (video_array(one) == frames).all()


def test_equal_frames_of_a_video_are_kept() -> None:
    still = video_bytes([picture(1)] * 4)
    assert len(frames_of(Media("video", still))) == 4


# ------------------------------------------------------------------------------------------------ refused forms


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"type": "image", "image": "https://example.org/a.png"}, "is on the network"),
        ({"type": "image_url", "image_url": {"url": "HTTP://example.org/a.png"}}, "nothing is fetched"),
        ({"type": "image", "image": "s3://bucket/a.png"}, "is on the network"),
        ({"type": "image", "image": "missing.png"}, "No such file"),
        ({"type": "image", "image": b"no picture"}, "pillow cannot read it"),
        ({"type": "image", "image": PNG[:200]}, "pillow cannot read it"),
        ({"type": "image", "image": "data:image/png;base64,%%%"}, "base64 is damaged"),
        ({"type": "image", "image": "data:image/png,abc"}, "base64"),
        ({"type": "image", "image": "pipe"}, "not a regular file"),
        ({"type": "image", "image": "/dev/zero"}, "not a regular file"),
        ({"type": "image"}, "missing"),
        ({"type": "image", "image": 7}, "int"),
        ({"type": "video", "video": np.zeros((2, 4, 4, 3), dtype=np.float32)}, "expected uint8"),
        ({"type": "video", "video": []}, "list"),
    ],
)
def test_malformed_media_name_row_and_field(part: Any, why: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match=why) as refused:
        of_part(part, tmp_path)
    assert "data.jsonl, line 3: field 'prompt[0].content[1]'" in str(refused.value)


def test_a_part_of_an_unknown_type_is_refused() -> None:
    content = [{"type": "image", "image": PNG}, {"type": "audio", "audio": "a.wav"}]
    with pytest.raises(DataError, match="'audio'; known are text, image"):
        parse([{"role": "user", "content": content}])


@pytest.mark.parametrize("content", [None, 5, {"type": "image"}, [None], [{"type": ["image"]}], [{"type": {}}]])
@pytest.mark.parametrize("columns", [{}, {"images": [PNG]}, {"videos": [None]}])
def test_contents_of_wrong_types_are_no_other_error(content: Any, columns: Mapping[str, Any]) -> None:
    try:
        parsed = parse([{"role": "user", "content": content}], **columns)
    except DataError as error:
        assert "data.jsonl, line 3: field 'prompt[0].content" in error.message
    else:
        assert not (columns or parsed.media), "the chat template decides"


@pytest.mark.parametrize(
    ("text", "images", "why"),
    [
        ("<image><image>", [PNG], "more <image> than the column 'images' has"),
        ("<image>", [PNG, PNG], "'images' has more items"),
        ("<image>", PNG, "expected a list"),
        ("<image>", 5, "expected a list"),
    ],
)
def test_columns_and_placeholders_must_have_equal_counts(text: str, images: Any, why: str) -> None:
    with pytest.raises(DataError, match=why):
        parse([{"role": "user", "content": text}], images=images)


def test_too_many_bytes_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(media_module, "MAX_MEDIA_BYTES", len(PNG) + 1)
    assert of_part({"type": "image", "image": PNG}).media
    (tmp_path / "big.png").write_bytes(PNG + b"\0" * 1000)
    for content in ([{"type": "image", "image": PNG}] * 2, [{"type": "image", "image": "big.png"}]):
        with pytest.raises(DataError, match="are allowed"):
            parse([{"role": "user", "content": content}], tmp_path)


def test_too_many_pixels_are_refused() -> None:
    import PIL.Image

    bomb = io.BytesIO()
    PIL.Image.new("1", (20_000, 20_000)).save(bomb, "PNG")
    with pytest.raises(DataError, match=r"are allowed|decompression bomb"):
        of_part({"type": "image", "image": bomb.getvalue()})


def tiff(*sizes: tuple[int, int]) -> bytes:
    """Return a TIFF whose pages have these sizes; blank pages take few bytes."""
    from PIL import Image

    written = io.BytesIO()
    first, *others = [Image.new("1", size) for size in sizes]
    first.save(written, "TIFF", save_all=True, append_images=others, compression="tiff_deflate")
    return written.getvalue()


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each decoding of a picture adds its pixels."""
    from PIL import ImageFile

    pixels: list[int] = []
    load = ImageFile.ImageFile.load

    def counted(image: Any) -> Any:
        pixels.append(image.width * image.height)
        return load(image)

    monkeypatch.setattr(ImageFile.ImageFile, "load", counted)
    return pixels


def test_the_pages_of_a_video_are_added_up_before_any_is_decoded(
    monkeypatch: pytest.MonkeyPatch, decoded: list[int]
) -> None:
    monkeypatch.setattr(stored_media, "MAX_PIXELS", 2_000_000)
    video = tiff((8, 8), *[(1000, 1000)] * 40)
    with pytest.raises(DataError, match=r"2000064 pixels; 2000000 are allowed"):
        of_part({"type": "video", "video": video})
    assert decoded == []
    assert len(frames_of(Media("image", video))) == 1, "an image is its first page"


def test_a_video_has_a_limited_number_of_frames(monkeypatch: pytest.MonkeyPatch, decoded: list[int]) -> None:
    monkeypatch.setattr(stored_media, "MAX_FRAMES", 20)
    assert len(frames_of(Media("video", tiff(*[(1, 1)] * 20)))) == 20
    decoded.clear()
    with pytest.raises(ValueError, match="more than 20 frames"):
        frames_of(Media("video", tiff(*[(1, 1)] * 21)))
    assert decoded == []


@pytest.mark.parametrize("form", ["array", "array file", "list of arrays", "list of images", "array of objects"])
def test_the_frames_of_a_video_are_counted_before_any_is_built(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    from PIL import Image

    def video(num_frames: int) -> Any:
        array = np.zeros((num_frames, 1, 1, 3), np.uint8)
        np.save(saved := io.BytesIO(), array)
        objects = np.empty(num_frames, object)
        objects[:] = images = [PNG] * num_frames
        return {
            "array": array,
            "array file": saved.getvalue(),
            "list of arrays": list(array),
            "list of images": images,
            "array of objects": objects,
        }[form]

    monkeypatch.setattr(stored_media, "MAX_FRAMES", 20)
    [one] = of_part({"type": "video", "video": video(20)}).media
    assert len(frames_of(one)) == 20
    for build in ("fromarray", "open"):
        monkeypatch.setattr(Image, build, lambda *_, **__: pytest.fail("a frame was built"))
    with pytest.raises(DataError, match="more than 20 frames, the limit for the videos of a prompt"):
        of_part({"type": "video", "video": video(21)})


def test_all_videos_of_a_row_share_the_limit_of_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_media, "MAX_FRAMES", 5)
    images = [{"type": "image", "image": PNG}] * 4
    videos = [{"type": "video", "video": gif(1, 2)}] * 2
    assert len(parse([{"role": "user", "content": images + videos}]).media) == 6
    with pytest.raises(DataError, match=r"content\[2\]'.*more than 5 frames"):
        parse([{"role": "user", "content": [*videos, {"type": "video", "video": gif(1, 2)}]}])


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("form", ["parts", "parts of two messages", "columns", "columns and parts"])
def test_a_row_has_a_limited_number_of_media(
    monkeypatch: pytest.MonkeyPatch, decoded: list[int], form: str, checked: bool
) -> None:
    def row(number: int) -> dict[str, Any]:
        parts = [{"type": "image", "image": PNG}, *[{"type": "video_url", "video_url": gif(1, 2)}] * (number - 1)]
        text = [{"type": "text", "text": "<image>" + "<video>" * (number - 2)}]
        contents = {
            "parts": [parts],
            "parts of two messages": [parts[:1], parts[1:]],
            "columns": [[{"type": "text", "text": text[0]["text"] + "<video>"}]],
            "columns and parts": [text, parts[:1]],
        }[form]
        columns = {"columns": number - 1, "columns and parts": number - 2}.get(form)
        media = {} if columns is None else {"images": [PNG], "videos": [gif(1, 2)] * columns}
        return {"prompt": [{"role": "user", "content": content} for content in contents], **media}

    monkeypatch.setattr(media_module, "MAX_MEDIA", 4)
    assert len(parse_row(row(4), "data.jsonl, line 3", checked=checked).media) == 4
    decoded.clear()
    with pytest.raises(
        DataError, match=r"^data.jsonl, line 3: the prompt has 5 images and videos; 4 are allowed. Give"
    ):
        parse_row(row(5), "data.jsonl, line 3", checked=checked)
    assert decoded == []


def test_a_row_of_very_many_media_is_refused_quickly() -> None:
    content = [{"type": "image", "image": PNG}] * 100_000
    started = time.thread_time()
    with pytest.raises(DataError, match=f"has 100000 images and videos; {stored_media.MAX_MEDIA} are allowed"):
        parse([{"role": "user", "content": content}])
    assert time.thread_time() - started < 2


def tiled(page: tuple[int, int], tile: tuple[int, int], samples: int = 1, bits: int = 8) -> bytes:
    """Return a TIFF of one page in one tile, which is zeros."""
    packed = zlib.compress(bytes(tile[0] * tile[1] * samples * bits // 8))
    tags = {256: page[0], 257: page[1], 258: bits, 259: 8, 262: 2 if samples > 1 else 1, 277: samples}
    tags |= {322: tile[0], 323: tile[1], 324: 8, 325: len(packed)}
    if samples > 3:
        tags[338] = 0
    return tiff_file(packed, tags)


def tiff_file(data: bytes, tags: Mapping[int, int]) -> bytes:
    """Return a TIFF of one page, with its data at 8."""
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in sorted(tags.items()))
    return struct.pack("<2sHI", b"II", 42, 8 + len(data)) + data + struct.pack("<H", len(tags)) + entries + bytes(4)


@pytest.mark.parametrize("kind", ["image", "video"])
def test_a_tile_that_is_larger_than_its_page_counts(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    monkeypatch.setattr(stored_media, "MAX_PIXELS", 1024 * 1024)
    assert len(frames_of(Media(kind, tiled((16, 16), (1024, 1024))))) == 1
    with pytest.raises(ValueError, match="it has at least 1049600 pixels"):
        frames_of(Media(kind, tiled((16, 16), (1025, 1024))))
    with pytest.raises(ValueError, match="it has at least 1398101 pixels"):
        frames_of(Media(kind, tiled((16, 16), (1024, 512), samples=4, bits=16)))


def test_all_media_of_a_row_share_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    size = picture(1).width * picture(1).height
    monkeypatch.setattr(stored_media, "MAX_PIXELS", 3 * size)
    images = [{"type": "image", "image": PNG}] * 3
    assert len(parse([{"role": "user", "content": images}]).media) == 3
    with pytest.raises(DataError, match=f"at least {4 * size} pixels"):
        parse([{"role": "user", "content": [*images, {"type": "image", "image": PNG}]}])
    with pytest.raises(DataError, match=f"at least {4 * size} pixels"):
        of_part({"type": "video", "video": [PNG] * 50})


def jpeg(scans: int, segments: bytes = b"") -> bytes:
    """Return a progressive JPEG of 2000 x 2000 pixels that repeats its last scan, to have `scans` in all."""
    from PIL import Image

    written = io.BytesIO()
    Image.new("L", (2000, 2000), 128).save(written, "JPEG", progressive=True)
    data = written.getvalue()
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:2] + segments + data[2:-2] + last * (scans - data.count(b"\xff\xda")) + data[-2:]


def refused_quickly(why: str, kind: str, data: bytes) -> None:
    started = time.thread_time()
    with pytest.raises(DataError, match=f"content\\[1\\]'.*{why}"):
        of_part({"type": kind, kind: data})
    assert time.thread_time() - started < 1


def test_a_jpeg_has_a_limited_number_of_scans() -> None:
    of_part({"type": "image", "image": jpeg(100)})
    of_part({"type": "image", "image": jpeg(10) + b"\xff\xda" * 1000})  # phones append a film
    thumbnail = b"\xff\xe1" + struct.pack(">H", 2002) + b"\xff\xda" * 1000
    of_part({"type": "image", "image": jpeg(10, thumbnail)})
    refused_quickly("more than 100 scans", "image", jpeg(101))
    refused_quickly("more than 100 scans", "image", jpeg(20_000, thumbnail))
    refused_quickly("more than 100 scans", "image", jpeg(20_000).replace(b"\xff\xda", b"\xff" * 5 + b"\xda"))


def test_a_tiff_has_a_limited_number_of_scans() -> None:
    data = jpeg(1000)
    tags = {256: 2000, 257: 2000, 258: 8, 259: 7, 262: 1, 273: 8, 277: 1, 278: 2000, 279: len(data)}
    refused_quickly("pillow cannot read it", "image", tiff_file(data, tags))


def test_the_pictures_of_a_jpeg_are_no_video() -> None:
    """The scans are counted in the first picture only."""
    written = io.BytesIO()
    picture(1).save(written, "MPO", save_all=True, append_images=[picture(2)])
    of_part({"type": "image", "image": written.getvalue()})
    refused_quickly("read as an image only", "video", written.getvalue())


def test_a_file_has_a_limited_number_of_exif_segments_and_colour_profiles() -> None:
    exif = [b"\xff\xe1" + struct.pack(">H", 8 + len(text)) + b"Exif\0\0" + text for text in (b"x" * 60_000, b"x")]
    refused_quickly("more than 100 Exif segments", "image", jpeg(10, exif[0] * 33 + exif[1] * 180_000))
    profile = b"iCCP" + b"name\0\0" + zlib.compress(bytes(1_000_000))
    chunk = struct.pack(">I", len(profile) - 4) + profile + struct.pack(">I", zlib.crc32(profile))
    refused_quickly("more than 100 colour profiles", "image", PNG[:33] + chunk * 5000 + PNG[33:])
    of_part({"type": "image", "image": PNG[:33] + chunk + PNG[33:]})


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"


@pytest.fixture
def ghostscript(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list of the calls of Ghostscript, which is not run."""
    from PIL import EpsImagePlugin, Image

    calls: list[Any] = []

    def run(*args: Any, **_: Any) -> Any:
        calls.append(args)
        return Image.new("RGB", (10, 10)).im

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", run)
    monkeypatch.setattr(Image, "ID", list(Image.ID))
    return calls


@pytest.mark.parametrize("format", ["PPM", "TGA", "ICO", "PCX", "SGI", "EPS"])
def test_files_of_other_formats_are_not_opened(format: str, ghostscript: list[Any]) -> None:
    written = io.BytesIO()
    picture(1).save(written, format)
    data = EPS if format == "EPS" else written.getvalue()
    with pytest.raises(DataError, match="cannot read it as PNG, JPEG, WEBP, GIF, BMP, TIFF"):
        of_part({"type": "image", "image": data})
    assert not ghostscript


@pytest.mark.parametrize("format", stored_media.FORMATS)
def test_files_of_the_listed_formats_are_read(format: str) -> None:
    written = io.BytesIO()
    picture(1).save(written, format)
    assert len(of_part({"type": "image", "image": written.getvalue()}).media) == 1


def test_other_libraries_are_limited_to_the_same_formats(ghostscript: list[Any]) -> None:
    from PIL import Image

    Image.init()
    with Image.open(io.BytesIO(EPS)) as opened:
        opened.load()
    assert len(ghostscript) == 1
    stored_media.restrict_formats()
    with pytest.raises(Image.UnidentifiedImageError):
        Image.open(io.BytesIO(EPS))
    with Image.open(io.BytesIO(PNG)) as opened:
        assert opened.format == "PNG"


def test_an_array_file_that_claims_to_be_huge_is_refused() -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "|u1", "fortran_order": False, "shape": (1 << 30, 1 << 10, 1 << 10, 3)}
    )
    with pytest.raises(DataError, match="not a valid video"):
        of_part({"type": "video", "video": header.getvalue() + b"0" * 100})


@pytest.mark.parametrize("header", ["(" * 200, "{'descr': 08}", "\n  x\n y", "-" * 5000, "{" * 9000])
def test_an_array_file_whose_header_is_no_python_is_refused(header: str) -> None:
    npy = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode()
    with pytest.raises(DataError, match=r"field 'videos': the value is not a valid video: numpy cannot read it"):
        parse([{"role": "user", "content": "<video>"}], videos=[npy])
    url = "data:video/x-npy;base64," + base64.b64encode(npy).decode()
    with pytest.raises(DataError, match="numpy cannot read it"):
        of_part({"type": "video", "video": url})


NPY = io.BytesIO()
np.save(NPY, np.zeros((2, 3, 4, 3), np.uint8))


@given(st.dictionaries(st.integers(6, 127), st.sampled_from(b"()[]{},:'\"0123 LTFu|<>\n\\-+.*#\x00\xff"), max_size=4))
def test_an_array_file_with_a_changed_header_is_read_or_refused(changes: Mapping[int, int]) -> None:
    npy = bytearray(NPY.getvalue())
    for at, byte in changes.items():
        npy[at] = byte
    with suppress(DataError):
        of_part({"type": "video", "video": bytes(npy)})


@pytest.mark.parametrize("format", ["PNG", "GIF", "WEBP", "TIFF", "BMP", "JPEG"])
def test_damaged_files_are_refused(format: str) -> None:
    written = io.BytesIO()
    picture(1).save(written, format)
    data = bytearray(written.getvalue())
    for kind in ("image", "video"):
        for at in range(0, len(data), max(1, len(data) // 60)):
            for damaged in (bytes(data[:at]), bytes(data[:at]) + b"\xff\xff\xff\xff" + bytes(data[at + 4 :])):
                try:
                    frames_of(Media(kind, damaged))
                except ValueError as error:
                    assert "pillow cannot read it" in str(error) or "are allowed" in str(error)


# ------------------------------------------------------------------------------------------------ tokens


def load(tmp_path: Path, model: ModelConfig, *rows: Any, **data: Any) -> list[Prompt]:
    """Return the prompts of a data file with these rows, which has `one.png` and `two.png` in its folder."""
    for seed, name in ((1, "one.png"), (2, "two.png")):
        (tmp_path / name).write_bytes(png(seed))
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    config = Config(model=model, data=DataConfig(train_files=(str(path),), shuffle=False, **data))
    prompts = load_prompts(config, load_tokenizer(model), tmp_path / "cache").train
    return [prompts.at(SampleId(0, number + 1)) for number in range(len(prompts))]


def looking(*images: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": "look: " + "<image>" * len(images)}], "images": list(images)}


def test_prompts_have_the_placeholders_of_the_models_processor(tmp_path: Path, model: ModelConfig) -> None:
    plain = {"prompt": [{"role": "user", "content": "look: "}]}
    both, text = load(tmp_path, model, looking("one.png", "two.png"), plain)
    processor = AutoProcessor.from_pretrained(model.path)
    written = processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "text", "text": "look: "}, {"type": "image"}, {"type": "image"}]}],
        add_generation_prompt=True,
    )
    expected = processor(text=written, images=[[picture(1), picture(2)]], add_special_tokens=False)["input_ids"][0]
    assert both.prompt_ids.tolist() == list(expected)
    assert both.media == (Media("image", PNG), Media("image", png(2)))
    assert (both.prompt_ids == processor.image_token_id).sum() == 2 * FEATURES
    assert text.media == () and processor.image_token_id not in text.prompt_ids


def test_a_parquet_file_holds_images_as_bytes(tmp_path: Path, model: ModelConfig) -> None:
    row = looking({"bytes": PNG, "path": None})
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "train.parquet")
    config = Config(model=model, data=DataConfig(train_files=(str(tmp_path / "train.parquet"),)))
    prompts = load_prompts(config, load_tokenizer(model), tmp_path / "cache").train
    assert prompts.at(SampleId(0, 1)).media == (Media("image", PNG),)


def test_a_model_without_videos_gets_frames_as_images(tmp_path: Path, model: ModelConfig) -> None:
    (tmp_path / "clip.tiff").write_bytes(video_bytes([picture(1), picture(2)]))
    content = [{"type": "video", "video": "clip.tiff"}, {"type": "text", "text": "!"}]
    (prompt,) = load(tmp_path, model, {"prompt": [{"role": "user", "content": content}]})
    frames = load(tmp_path, model, {"prompt": [{"role": "user", "content": "<image><image>!"}], "images": [
        "data:image/png;base64," + base64.b64encode(image_bytes(picture(seed))).decode() for seed in (1, 2)
    ]})[0]  # fmt: skip
    assert prompt.prompt_ids.tolist() == frames.prompt_ids.tolist()
    assert prompt.media == frames.media and all(one.kind == "image" for one in prompt.media)
    assert prompt.messages[0]["content"][0] == {"type": "image", "image": "clip.tiff"}


def test_a_model_without_videos_gets_a_limited_number_of_frames(
    tmp_path: Path, model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media_module, "MAX_MEDIA", 3)
    (tmp_path / "clip.tiff").write_bytes(video_bytes([picture(1), picture(2)]))
    video = {"type": "video", "video": "clip.tiff"}
    (prompt,) = load(
        tmp_path, model, {"prompt": [{"role": "user", "content": [video, {"type": "image", "image": "one.png"}]}]}
    )
    assert len(prompt.media) == 3
    with pytest.raises(ConfigError, match=r"line 1: this model takes the frames .* at least 4; 3 are allowed. Give"):
        load(tmp_path, model, {"prompt": [{"role": "user", "content": [video, video]}]})


def test_a_text_model_refuses_rows_with_images(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train.jsonl, line 2: it has images .* takes text only; give a vision"):
        load(tmp_path, ModelConfig(path="asyncrl://quickstart"), {"prompt": "1+1="}, looking("one.png"))


@pytest.mark.parametrize("overlong", ["left", "middle", "right", "error"])
def test_prompts_with_images_are_not_cut(tmp_path: Path, model: ModelConfig, overlong: str) -> None:
    with pytest.raises(ConfigError, match=r"max_prompt_length = 9.*filter"):
        load(tmp_path, model, looking("one.png"), max_prompt_length=9, overlong_prompts=overlong)


def test_overlong_prompts_with_images_are_filtered(tmp_path: Path, model: ModelConfig) -> None:
    (only,) = load(tmp_path, model, looking("one.png"), {"prompt": "1"}, max_prompt_length=25)
    assert only.media == ()


def test_a_template_that_drops_images_is_refused(tmp_path: Path, model: ModelConfig) -> None:
    (template := tmp_path / "template.jinja").write_text("{{ messages[0]['role'] }}: nothing to see")
    with pytest.raises(ConfigError, match="line 1: the model's processor refuses the prompt with its 1 images"):
        load(tmp_path, model.model_copy(update={"chat_template": str(template)}), looking("one.png"))
