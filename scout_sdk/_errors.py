"""
The exception tree.

ScoutError
  ConfigError      (ValueError)   a setting or argument is wrong; names the allowed values
  ProtocolError    (ValueError)   a strict decoder met malformed wire data
  UnsupportedError (RuntimeError) a library or engine version that we do not support
"""

__all__ = ["ConfigError", "ProtocolError", "ScoutError", "UnsupportedError"]


class ScoutError(Exception):
    """Root of every exception that Scout raises on purpose."""


class ConfigError(ScoutError, ValueError):
    """A setting or argument is wrong; the message names the allowed values."""


class ProtocolError(ScoutError, ValueError):
    """Wire data is malformed; raised by strict decoders only, never on a request path."""


class UnsupportedError(ScoutError, RuntimeError):
    """An installed library or engine is outside the supported range."""
