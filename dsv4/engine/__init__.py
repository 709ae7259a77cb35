"""Continuous batching over a model: requests join and leave at any step."""

from dsv4.engine.engine import Engine
from dsv4.engine.request import Completion, Request

__all__ = ["Completion", "Engine", "Request"]
