"""Imports for a command that answers at once, without what its libraries load and it does not use."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

ASYNC = "sqlalchemy.ext.asyncio"


@contextmanager
def quick_imports() -> Iterator[None]:
    # redis-py imports them for a name in its annotations, and that takes longer than redis-py itself.
    sys.modules.setdefault("opentelemetry.sdk.metrics", None)  # type: ignore[arg-type]
    if ASYNC not in sys.modules:
        sys.meta_path.insert(0, _WithoutOrm())
    gc.disable()  # looking for garbage took a tenth of the imports' time
    try:
        yield
    finally:
        gc.freeze()  # what was imported stays: neither the work nor the exit looks through it
        gc.enable()


class _WithoutOrm:
    """`sqlalchemy.ext.asyncio` without sessions, which bring the ORM; another name than these loads it whole."""

    NAMES = ("AsyncConnection", "AsyncEngine", "create_async_engine")

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name != ASYNC:
            return None
        sys.meta_path.remove(self)
        spec: Any = find_spec(name)
        self.whole, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: object) -> None: ...

    def exec_module(self, package: Any) -> None:
        def rest(name: str) -> Any:
            vars(package).pop("__getattr__", None)
            self.whole.exec_module(package)
            return getattr(package, name)

        engine = import_module(f"{ASYNC}.engine")
        vars(package).update({name: getattr(engine, name) for name in self.NAMES})
        package.__getattr__ = rest
