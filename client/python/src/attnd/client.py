"""The client: one channel to one server, one method per call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from numpy.typing import NDArray

from attnd import arguments, errors, results
from attnd.v1 import admin_pb2, admin_pb2_grpc, attention_pb2, attention_pb2_grpc

Response = TypeVar("Response")

# Tensors travel inside messages, so gRPC's default limit of 4 MiB is lifted on both ways.
_UNLIMITED = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))


class Client:
    """A connection to an attnd server. Safe to use from several threads.

        with Client("127.0.0.1:50051", timeout=10) as client:
            result = client.forward("BS3HD", qkv=qkv)

    Args:
      address: "host:port" or "unix:/path". The connection is made by the first call.
      timeout: seconds that a call may take, unless the call says otherwise; None: no limit.
      channel_options: more gRPC channel arguments, as (name, value) pairs.

    All calls raise AttndError's subclasses for what the service refuses (InvalidArgumentError with
    .field and .reason, ResourceExhaustedError with .retry_after, ...), DeadlineExceededError after
    the timeout and UnavailableError where no server answers.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout: float | None = None,
        channel_options: Sequence[tuple[str, Any]] = (),
    ) -> None:
        self._timeout = timeout
        self._channel = grpc.insecure_channel(address, options=[*_UNLIMITED, *channel_options])
        self._attention = attention_pb2_grpc.AttentionStub(self._channel)
        self._admin = admin_pb2_grpc.AdminStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection; calls under way are cancelled."""
        self._channel.close()

    def forward(
        self,
        layout: str,
        *,
        timeout: float | None = None,
        **attention: Unpack[arguments.ForwardArguments],
    ) -> results.ForwardResult:
        """Computes O = softmax(scale Q K^T, masked) V.

        Args:
          layout: "BS3HD", "THD_T2HD", "BHSD_BHSD_BHSD", ...: how Q, K and V lie in the buffers.
          timeout: seconds; default: the client's.
          **attention: the buffers, the sequences, the mask, ...: see ForwardArguments.

        Returns:
          out, in Q's format with head_dim_v last and the dtype of the buffers (or out_dtype); lse
          [b, h, s_q] or [t_q, h], with return_lse; context, with retain_for_backward; and how the
          call ran.
        """
        request = attention_pb2.ForwardRequest(
            **arguments.forward_fields(layout, attention, with_data=True)
        )
        return results.forward_result(self._call(self._attention.Forward, request, timeout))

    def backward(
        self,
        layout: str,
        *,
        out: NDArray,
        lse: NDArray,
        d_out: NDArray,
        timeout: float | None = None,
        **attention: Unpack[arguments.AttentionArguments],
    ) -> results.BackwardResult:
        """Computes the gradients of the buffers, and of bias and softmax_offset where there are any.

        Args:
          layout: as forward had it.
          out, lse: what forward returned (with return_lse).
          d_out: gradient of out, in its shape and dtype.
          timeout: seconds; default: the client's.
          **attention: what forward had: see AttentionArguments. Whatever shaped its result must be
            the same here, the dropout's seed and offset included.

        Returns:
          grads, with the names and the packed form of the buffers; d_bias (none of a mask) and
          d_softmax_offset; and how the call ran.
        """
        given = {"out": out, "lse": lse, "d_out": d_out}
        request = attention_pb2.BackwardRequest(
            **arguments.backward_fields(layout, attention, given)
        )
        result = results.backward_result(self._call(self._attention.Backward, request, timeout))
        if attention.get("mask") is not None:
            return dataclasses.replace(result, d_bias=None)
        return result

    def backward_of(
        self,
        context: arguments.Handle,
        *,
        d_out: NDArray,
        fp8: Mapping[str, float] | None = None,
        timeout: float | None = None,
    ) -> results.BackwardResult:
        """Computes the same gradients for a forward that the server retains.

        Args:
          context: of a result of forward with retain_for_backward. It may be used again until its
            lease ends; after that the call raises FailedPreconditionError.
          d_out: gradient of out, in its shape and dtype.
          fp8: scales of the backward pass, where they are not those that forward was given.
          timeout: seconds; default: the client's.

        Returns:
          As backward; after a forward with a mask, d_bias is that of the bias that stood for it.
        """
        request = attention_pb2.BackwardRequest(
            **arguments.retained_backward_fields(context, d_out, fp8)
        )
        return results.backward_result(self._call(self._attention.Backward, request, timeout))

    def plan(
        self,
        layout: str,
        *,
        backward: bool = False,
        timeout: float | None = None,
        **attention: Unpack[arguments.ForwardArguments],
    ) -> results.PlanResult:
        """Says what forward (or backward) would do with the same arguments, and sends no tensor.

        Buffers may be arrays or shapes (tuples; then dtype is needed). A contradiction raises as
        in forward; what is valid but not supported comes back with supported = False.
        """
        request = attention_pb2.PlanRequest(
            **arguments.forward_fields(layout, attention, with_data=False), backward=backward
        )
        return results.plan_result(self._call(self._attention.Plan, request, timeout))

    def capabilities(self, *, timeout: float | None = None) -> results.Capabilities:
        """The server's versions, backends and limits."""
        request = admin_pb2.GetCapabilitiesRequest()
        return results.capabilities(self._call(self._admin.GetCapabilities, request, timeout))

    def health(self, service: str = "", *, timeout: float | None = None) -> str:
        """Returns "SERVING" or "NOT_SERVING"; NotFoundError for a service unknown to the server."""
        request = health_pb2.HealthCheckRequest(service=service)
        response = self._call(self._health.Check, request, timeout)
        return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)

    def _call(
        self, method: Callable[..., Response], request: object, timeout: float | None
    ) -> Response:
        try:
            return method(request, timeout=self._timeout if timeout is None else timeout)
        except grpc.RpcError as error:
            raise errors.from_rpc_error(error) from None
