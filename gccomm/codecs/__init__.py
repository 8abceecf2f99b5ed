"""Codecs: one family a file, found by id through the registry."""

from gccomm.codecs.base import Codec
from gccomm.codecs.registry import get_codec, list_codecs, register_codec

__all__ = ["Codec", "get_codec", "list_codecs", "register_codec"]
