"""Stands in for the packages that only engines on GPUs use. A module of them can
be imported, and what it holds is a class that nothing calls."""

import importlib.abc
import importlib.machinery
import sys
import types

PACKAGES = {"IPython", "flashinfer", "sgl_kernel"}


class Kind(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return made(name)

    def __getitem__(cls, key):
        return cls


def made(name):
    def call(cls, *args, **kwargs):
        # A decorator that is applied returns what it decorates.
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        return object.__new__(cls)

    return Kind(name, (), {"__new__": call})


class Module(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, made(name))
        return self.__dict__[name]


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in PACKAGES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Module(spec.name)

    def exec_module(self, module):
        pass


def install():
    sys.meta_path.append(Finder())
