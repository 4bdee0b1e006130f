"""What the calls raise: one class per canonical gRPC code, with the service's details."""

from __future__ import annotations

from typing import ClassVar

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

_DETAILS_KEY = "grpc-status-details-bin"
_DOMAIN = "attnd"


class AttndError(Exception):
    """The service refused a call, or could not be reached.

    Attributes:
      code: canonical gRPC code.
      message: the sentence that says what is wrong and names the field.
      field: full path of the field at fault ("sequences.cu_seqlens_q"); "" where none is.
      reason: stable machine-readable reason ("SHAPE_MISMATCH"); "" where the error did not come
        from attnd (no connection, for one).
      retry_after: seconds after which a retry may succeed; None where the service says nothing.
    """

    canonical_code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode | None = None,
        field: str = "",
        reason: str = "",
        retry_after: float | None = None,
    ) -> None:
        self.code = self.canonical_code if code is None else code
        self.message = message
        self.field = field
        self.reason = reason
        self.retry_after = retry_after
        super().__init__(f"{self.code.name}: {message}")


class InvalidArgumentError(AttndError):
    """The parts of the request contradict one another."""

    canonical_code = grpc.StatusCode.INVALID_ARGUMENT


class UnimplementedError(AttndError):
    """Valid, but no backend of this server does it."""

    canonical_code = grpc.StatusCode.UNIMPLEMENTED


class NotFoundError(AttndError):
    """The handle, region or session does not exist."""

    canonical_code = grpc.StatusCode.NOT_FOUND


class FailedPreconditionError(AttndError):
    """The handle or session expired, was released, or belongs to another server."""

    canonical_code = grpc.StatusCode.FAILED_PRECONDITION


class AbortedError(AttndError):
    """The position of an append does not match the session."""

    canonical_code = grpc.StatusCode.ABORTED


class ResourceExhaustedError(AttndError):
    """A pool, the queue or a quota is full; see retry_after."""

    canonical_code = grpc.StatusCode.RESOURCE_EXHAUSTED


class OutOfRangeError(AttndError):
    """Beyond the capacity of a session."""

    canonical_code = grpc.StatusCode.OUT_OF_RANGE


class DeadlineExceededError(AttndError):
    """The timeout passed before the answer came."""

    canonical_code = grpc.StatusCode.DEADLINE_EXCEEDED


class CancelledError(AttndError):
    """The call was cancelled."""

    canonical_code = grpc.StatusCode.CANCELLED


class UnavailableError(AttndError):
    """No server there, or it is draining: the one error to retry blindly."""

    canonical_code = grpc.StatusCode.UNAVAILABLE


class UnauthenticatedError(AttndError):
    """No token, or a wrong one."""

    canonical_code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDeniedError(AttndError):
    """The tenant may not do this."""

    canonical_code = grpc.StatusCode.PERMISSION_DENIED


class InternalError(AttndError):
    """A fault of the server."""

    canonical_code = grpc.StatusCode.INTERNAL


_BY_CODE = {error.canonical_code: error for error in AttndError.__subclasses__()}


def from_rpc_error(error: grpc.RpcError) -> AttndError:
    """The typed twin of what gRPC raised, with the details of its trailing metadata."""
    field, reason, retry_after = "", "", None
    for detail in _status_details(error):
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            detail.Unpack(info)
            reason = info.reason if info.domain == _DOMAIN else reason
        elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            request = error_details_pb2.BadRequest()
            detail.Unpack(request)
            field = request.field_violations[0].field if request.field_violations else field
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            detail.Unpack(retry)
            retry_after = retry.retry_delay.ToNanoseconds() / 1e9
    code = error.code()
    return _BY_CODE.get(code, AttndError)(
        error.details() or "", code=code, field=field, reason=reason, retry_after=retry_after
    )


def _status_details(error: grpc.RpcError) -> list:
    """The google.protobuf.Any details of the status; none where it carries none or is no Status."""
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY:
            try:
                return list(status_pb2.Status.FromString(value).details)
            except DecodeError:
                return []
    return []
