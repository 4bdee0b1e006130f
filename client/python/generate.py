"""Generates the package attnd.v1 (messages, stubs, type hints) from the repository's protos.

`pip install` runs this by itself. Run it by hand to use the client from the source tree:

    python client/python/generate.py && export PYTHONPATH=client/python/src

Needs grpcio-tools.
"""

import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
PROTO_ROOT = HERE.parents[1] / "proto"
SOURCE_ROOT = HERE / "src"


class GenerateError(RuntimeError):
    """The stubs could not be generated."""


def generate() -> list[pathlib.Path]:
    """Writes src/attnd/v1 and returns the protos that it was made from."""
    protos = sorted((PROTO_ROOT / "attnd" / "v1").glob("*.proto"))
    if not protos:
        raise GenerateError(
            f"no protos in {PROTO_ROOT}/attnd/v1: the client is built inside a checkout of the "
            "attnd repository (pip install client/python)"
        )
    from grpc_tools import protoc  # Late, so that a missing proto folder is reported first.

    package = SOURCE_ROOT / "attnd" / "v1"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text('"""Generated from proto/attnd/v1."""\n')
    arguments = [
        "protoc",
        f"-I{PROTO_ROOT}",
        f"--python_out={SOURCE_ROOT}",
        f"--pyi_out={SOURCE_ROOT}",
        f"--grpc_python_out={SOURCE_ROOT}",
        *(str(proto) for proto in protos),
    ]
    if protoc.main(arguments) != 0:
        raise GenerateError(f"protoc failed on {PROTO_ROOT}/attnd/v1")
    return protos


if __name__ == "__main__":
    try:
        made_from = generate()
    except (GenerateError, ImportError) as error:
        sys.exit(f"generate.py: {error}")
    print(f"generated {SOURCE_ROOT / 'attnd' / 'v1'} from {len(made_from)} protos")
