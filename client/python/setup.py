"""Build step: generates attnd.v1 before setuptools collects the packages."""

import pathlib
import sys

from setuptools import setup
from setuptools.command.build_py import build_py

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import generate


class BuildPyWithStubs(build_py):
    """build_py whose packages exist only after the generator ran."""

    def finalize_options(self) -> None:
        generate.generate()
        super().finalize_options()


setup(cmdclass={"build_py": BuildPyWithStubs})
