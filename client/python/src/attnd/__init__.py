"""Client of the attnd attention service: NumPy arrays in, NumPy arrays out.

    with attnd.Client("127.0.0.1:50051") as client:
        result = client.forward("BS3HD", qkv=qkv, causal="top_left")  # qkv [b, s, 3, h, d]
        result.out  # [b, s, h, d]

See Client for the calls, AttentionArguments for what they take and errors for what they raise.
"""

from attnd import views
from attnd.arguments import AttentionArguments, Dropout, ForwardArguments, Handle, View
from attnd.client import Client
from attnd.errors import (
    AbortedError,
    AttndError,
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
)
from attnd.results import (
    BackendCapabilities,
    BackwardResult,
    Capabilities,
    Device,
    ExecutionInfo,
    ForwardResult,
    Gradients,
    Limits,
    PlanResult,
)

__all__ = [
    "AbortedError",
    "AttentionArguments",
    "AttndError",
    "BackendCapabilities",
    "BackwardResult",
    "CancelledError",
    "Capabilities",
    "Client",
    "DeadlineExceededError",
    "Device",
    "Dropout",
    "ExecutionInfo",
    "FailedPreconditionError",
    "ForwardArguments",
    "ForwardResult",
    "Gradients",
    "Handle",
    "InternalError",
    "InvalidArgumentError",
    "Limits",
    "NotFoundError",
    "OutOfRangeError",
    "PermissionDeniedError",
    "PlanResult",
    "ResourceExhaustedError",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "View",
    "views",
]
