"""Finds a Redis or Valkey server that is fit for a job queue, or starts one: no root, container or network."""

from .server import DidNotStart, EngineError, NoServerFound, RedisServer, UnusableDirectory, ensure_redis

__all__ = ["DidNotStart", "EngineError", "NoServerFound", "RedisServer", "UnusableDirectory", "ensure_redis"]
