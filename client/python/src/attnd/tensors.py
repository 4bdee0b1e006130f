"""NumPy arrays as attnd.v1.Tensor messages and back."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from attnd.v1 import types_pb2

_DATA_TYPES = {
    np.dtype("<f4"): types_pb2.DATA_TYPE_FLOAT32,
    np.dtype("<f2"): types_pb2.DATA_TYPE_FLOAT16,
    np.dtype(ml_dtypes.bfloat16): types_pb2.DATA_TYPE_BFLOAT16,
    np.dtype(ml_dtypes.float8_e4m3fn): types_pb2.DATA_TYPE_FLOAT8_E4M3,
    np.dtype(ml_dtypes.float8_e5m2): types_pb2.DATA_TYPE_FLOAT8_E5M2,
    np.dtype("<i4"): types_pb2.DATA_TYPE_INT32,
}
_NUMPY_DTYPES = {data_type: dtype for dtype, data_type in _DATA_TYPES.items()}


def data_type_of(dtype: DTypeLike) -> types_pb2.DataType:
    """The attnd.v1.DataType of a NumPy dtype; TypeError for one that the service has not."""
    data_type = _DATA_TYPES.get(np.dtype(dtype))
    if data_type is None:
        known = ", ".join(known.name for known in _DATA_TYPES)
        raise TypeError(f"dtype {np.dtype(dtype)} is none of {known} (little-endian)")
    return data_type


def encode(array: ArrayLike) -> types_pb2.Tensor:
    """The array's shape, dtype and row-major bytes."""
    array = np.asarray(array)
    return types_pb2.Tensor(
        dtype=data_type_of(array.dtype), shape=array.shape, data=array.tobytes()
    )


def encode_shape(shape: tuple[int, ...], dtype: DTypeLike) -> types_pb2.Tensor:
    """A tensor without a source, as Plan takes it."""
    return types_pb2.Tensor(dtype=data_type_of(dtype), shape=shape)


def decode(tensor: types_pb2.Tensor) -> NDArray:
    """The tensor's array. It is read-only, since it shares the bytes of the reply."""
    dtype = _NUMPY_DTYPES[tensor.dtype]
    return np.frombuffer(tensor.data, dtype=dtype).reshape(tuple(tensor.shape))
