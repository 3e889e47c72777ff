"""Data sets, stores and loaders. Import the submodules: `from datasets.memory import cifar10`.

Hugging Face's package has the same name, and both can be used: `from datasets import load_dataset`. A name or
a module that this package does not have is looked for there, if it is installed (pip install datasets). At
the first of them its folder joins `__path__`, and its `__init__` runs in this namespace (run_installed.py).
"""

import importlib.machinery
import sys
from typing import Any

_REASON = "Bootfile does not have it, and Hugging Face's package is not installed: pip install datasets"


def __getattr__(name: str) -> Any:
    """Return a name of the installed package. Python calls it for a name that this package does not have.
    Raises AttributeError."""
    # `from datasets import files` asks for the name of our module before it is imported
    is_ours = bool(importlib.machinery.PathFinder.find_spec(f"{__name__}.{name}", __path__[:1]))
    is_theirs = not is_ours and (not name.startswith("_") or name == "__version__")
    if is_theirs and _Installed.load() and name in globals():
        return globals()[name]
    reason = f": {_REASON}" if is_theirs and not _Installed.folder else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{reason}")


class _Installed:
    """A finder of the modules that only the installed package has."""

    file = ""  # the package's `__init__`
    folder = ""  # its folder; set while `__init__` runs and afterwards

    @classmethod
    def load(cls) -> bool:
        """Run the installed package's `__init__` in this namespace, once. Return whether it is installed."""
        from importlib import metadata  # takes 30 ms

        try:
            file = metadata.distribution(__name__).locate_file(f"{__name__}/__init__.py")
        except metadata.PackageNotFoundError:
            return False
        cls.file = str(file)
        import datasets.run_installed  # noqa: F401  # other threads wait; if it fails, the next use tries again

        return True

    @classmethod
    def find_spec(cls, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        """Find a module of the installed package, but import nothing: other threads cannot import now. Python
        calls it for each module that no other finder has."""
        is_new = name.rpartition(".")[0] == __name__ and not cls.folder
        return importlib.machinery.ModuleSpec(name, cls) if is_new else None  # type: ignore[arg-type]

    @classmethod
    def create_module(cls, spec: importlib.machinery.ModuleSpec) -> Any:
        """Return a module of the installed package. Raises MissingPackage, which is an ImportError."""
        if not cls.load():
            from bootfile.ground.errors import MissingPackage

            raise MissingPackage(f"{spec.name}: {_REASON}")
        module = importlib.import_module(spec.name)  # `__init__` may have imported it
        spec.loader_state = module.__spec__
        return module

    @staticmethod
    def exec_module(module: Any) -> None:
        """Give the module its own spec back. Python calls it after create_module(), which has run it."""
        module.__spec__ = module.__spec__.loader_state


sys.meta_path.append(_Installed)  # the last one: it is asked only for modules that are not here
