"""Convert the parts of a message's content to Anthropic's blocks: texts, images and documents."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from .._core.validation import Shown, must, redacted
from ..errors import RequestRefused

PROVIDER = "anthropic"

Block = dict[str, Any]

THINKING = frozenset({"thinking", "redacted_thinking"})
_DATA_URL = re.compile(r"data:([^;,]*)(?:;[^;,]*)*;base64,(.*)", re.DOTALL | re.IGNORECASE)
# Libraries and browsers write these names; Anthropic accepts only the registered ones.
_ALIASES = {
    "image/jpg": "image/jpeg",
    "image/pjpeg": "image/jpeg",
    "image/jfif": "image/jpeg",
    "image/x-jpeg": "image/jpeg",
    "image/x-png": "image/png",
    "image/x-webp": "image/webp",
    "application/x-pdf": "application/pdf",
    "application/acrobat": "application/pdf",
    "text/pdf": "application/pdf",
}
_IMAGES = ("image/jpeg", "image/png", "image/gif", "image/webp")
_DOCUMENTS = ("application/pdf", "text/plain")
_FROM_URL_SAFE = str.maketrans("-_", "+/")
# Parts of answers of other providers.
_FOREIGN = frozenset({"reasoning", "reasoning_content"})


def refused(message: str) -> RequestRefused:
    return RequestRefused(message, provider=PROVIDER)


def parts(content: Any, where: str) -> list[Block]:
    """Return the blocks of a message's content, without empty texts, which Anthropic rejects."""
    if content is None:
        return []
    if isinstance(content, Mapping):
        content = json.dumps(content, ensure_ascii=False)
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    blocks = [
        _part({"type": "text", "text": part} if isinstance(part, str) else part, f"{where}.content[{index}]")
        for index, part in enumerate(content)
    ]
    return [block for block in blocks if not is_blank(block) and block.get("type") not in _FOREIGN]


def is_blank(block: Mapping[str, Any]) -> bool:
    return block.get("type") == "text" and not str(block.get("text") or "").strip()


def with_mark(blocks: list[Block], mark: Any) -> list[Block]:
    """Return the blocks with a `cache_control` mark on the last one that may have it."""
    if mark:
        for index in reversed(range(len(blocks))):
            if blocks[index].get("type") not in THINKING:
                blocks[index] = {**blocks[index], "cache_control": mark}
                break
    return blocks


def plain_or_blocks(blocks: list[Block]) -> str | list[Block]:
    """Return the text alone if there is nothing else, otherwise the blocks."""
    return str(blocks[0]["text"]) if len(blocks) == 1 and blocks[0].keys() == {"type", "text"} else blocks


def _part(part: Mapping[str, Any], where: str) -> Block:
    inner = part.get(str(part.get("type")))
    # Some libraries write the mark into the object with the data.
    mark = part.get("cache_control") or (inner.get("cache_control") if isinstance(inner, Mapping) else None)
    kept = {"cache_control": mark} if mark else {}
    match part.get("type"):
        case "text" | "input_text" | "output_text":
            return {"type": "text", "text": part.get("text") or "", **kept}
        case "refusal":
            return {"type": "text", "text": part.get("refusal") or "", **kept}
        case "image_url" | "input_image":
            image = part.get("image_url")
            url = image.get("url") if isinstance(image, Mapping) else image
            return {"type": "image", "source": _source(str(url), "image/", where), **kept}
        case "file":
            return _document(part.get("file") or {}, where) | kept
        case "input_file":
            return _document(part, where) | kept
        case "input_audio":
            raise refused(str(must(f"{where}: a part", "be text, an image or a document", "input_audio")))
        case "image" | "document":
            return _own(part, where)
    return dict(part)


def _own(part: Mapping[str, Any], where: str) -> Block:
    """Return a part in Anthropic's own format, with a media type that Anthropic accepts."""
    source = part.get("source")
    if not isinstance(source, Mapping) or source.get("type") != "base64":
        return dict(part)
    accepted = _IMAGES if part.get("type") == "image" else _DOCUMENTS
    media = _media_type(source.get("media_type"), accepted, where)
    data = source.get("data")
    return {
        **part,
        "source": {**source, "media_type": media, "data": _plain_base64(data) if isinstance(data, str) else data},
    }


def _document(file: Mapping[str, Any], where: str) -> Block:
    if file.get("file_data"):
        source = _source(str(file["file_data"]), "application/pdf", where)
    elif file.get("file_url"):
        source = _source(str(file["file_url"]), "application/pdf", where)
    elif file.get("file_id"):
        source = {"type": "file", "file_id": str(file["file_id"])}
    else:
        raise must(where, "have file_data, file_url or file_id", Shown("none of them"), "Add one")
    return {"type": "document", "source": source} | ({"title": file["filename"]} if file.get("filename") else {})


def _source(url: str, kind: str, where: str) -> dict[str, str]:
    if found := _DATA_URL.fullmatch(url):
        given, data = found[1], _plain_base64(found[2])
        media = _media_type(given, _IMAGES if kind == "image/" else _DOCUMENTS, where)
        if media == "text/plain":
            return {"type": "text", "media_type": media, "data": _decoded(data, where)}
        return {"type": "base64", "media_type": media, "data": data}
    if url[:8].lower() == "https://":
        return {"type": "url", "url": url}
    raise must(f"{where}: URL", f"be https, or data:{kind}…;base64,…", redacted(url[:200]))


def _media_type(given: Any, accepted: tuple[str, ...], where: str) -> str:
    name = str(given or "").partition(";")[0].strip().lower()
    name = _ALIASES.get(name, name)
    if name.startswith("text/") and "text/plain" in accepted:
        name = "text/plain"  # Anthropic has one name for all texts
    if name not in accepted:
        constraint = f"be {', '.join(accepted[:-1])} or {accepted[-1]} for Anthropic"
        raise must(f"media type of {where}", constraint, str(given), "Convert the file, or send its text")
    return name


def _plain_base64(data: str) -> str:
    """Return base64 in the only form that Anthropic accepts: without line breaks, %-escapes and URL-safe letters."""
    data = "".join(unquote(data).split()).translate(_FROM_URL_SAFE)
    return data + "=" * (-len(data) % 4)


def _decoded(data: str, where: str) -> str:
    try:
        return base64.b64decode(data, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        raise must(f"data of {where}", "be UTF-8 text in base64", data, "Encode the bytes of the text") from None
