"""Stand-ins for large packages, so that --help does not wait until they are imported.

A job imports torch at its top and defines its options in main(). Importing torch takes seconds, and --help
does not use it. With --help, common/entry.py calls install(): an import of one of PACKAGES then gives an
empty module. Its attributes are classes that can be called, subscripted, subclassed and used as decorators.
main() runs up to parse_args(), which prints the help and exits. If anything else happens, the process starts
again with the real packages. Sphinx does the same (autodoc_mock_imports).
"""

import os
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any, NoReturn

PACKAGES = frozenset({
    "PIL", "albumentations", "boto3", "botocore", "cv2", "mlflow", "numpy", "nvidia", "pandas", "psutil",
    "pyarrow", "ray", "redis", "scipy", "simplejpeg", "sklearn", "tensorboard", "timm", "torch", "torchaudio",
    "torchvision", "tqdm", "transformers", "wandb",
})  # fmt: skip
_REAL = "BOOTFILE_HELP_IMPORTS"  # set if the process has started again with the real packages


def install() -> None:
    """Make imports of PACKAGES give stand-ins, unless torch is imported or stand-ins have failed before."""
    if _REAL not in os.environ and "torch" not in sys.modules:
        sys.meta_path.insert(0, _Finder)
        sys.excepthook = lambda *error: _start_again()  # a module could not be imported with the stand-ins


def run(main: Callable[[], object]) -> None:
    """Call main() if stand-ins are installed: it prints the help and exits. Otherwise the process starts
    again with the real packages."""
    if _Finder not in sys.meta_path:
        return
    try:
        main()
    except SystemExit as end:
        if not end.code:
            raise
    except Exception:
        pass  # main() runs again with the real packages, and raises its error then
    _start_again()


def _start_again() -> NoReturn:
    os.environ[_REAL] = "real"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


class _Meta(type):
    """The class of StandIn: its attributes, calls and items are StandIn again."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        decorated = len(args) == 1 and not kwargs and isinstance(args[0], FunctionType | type)
        return args[0] if decorated else StandIn

    def __getitem__(cls, key: object) -> Any:
        return StandIn

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


class StandIn(metaclass=_Meta):
    """The stand-in for any function, class or value of a package."""


class _Finder:
    """Finds and loads the modules of PACKAGES, as empty packages."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in PACKAGES:
            return None
        return ModuleSpec(name, _Finder, is_package=True)  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        """Return None: the import system makes the module."""

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        vars(module).update(__version__="0", __getattr__=_Meta.__getattr__.__get__(StandIn))
