"""The version of the package, written here only; setuptools and CMake read it from this file."""

__version__ = "0.1.0"
