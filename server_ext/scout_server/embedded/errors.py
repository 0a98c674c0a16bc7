"""Errors of the OpenAI API."""

from scout_sdk._errors import ScoutError

__all__ = ["ApiError"]


class ApiError(ScoutError, ValueError):
    """A request that cannot be served; becomes an error body of the OpenAI API."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, object]:
        """Return the error as JSON."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": str(self),
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }
