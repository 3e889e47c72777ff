"""Follow imports: the modules of the project, whose statements are walked over once."""

import ast
from typing import Any

from bootfile.lint.names import Names
from bootfile.lint.record import Frame, Module
from bootfile.lint.values import Value


class Modules(Names):
    """Follows imports."""

    def _run_module(self, module: Module, main: bool) -> None:
        # only the script itself runs what stands under `if __name__ == "__main__"`
        module.names["__name__"] = Value("const", key="__main__" if main else "")
        module.names["__file__"] = Value("path", "__file__")
        self._frames.append(Frame(module, module.names))
        try:
            self._block(module.source.tree.body)
        finally:
            self._frames.pop()

    def _do_import(self, node: ast.Import) -> None:
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            full = alias.name if alias.asname else name
            self._frames[-1].names[name] = self._import(alias.name, full, 0, node)

    def _do_importfrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        path = self.project.find(module, node.level, self._path())
        loaded = self._load(path) if path else None
        names = self._frames[-1].names
        for alias in node.names:
            full = f"{module}.{alias.name}"
            inner = self.project.find(full.lstrip("."), node.level, self._path())
            if alias.name == "*":
                names.update({**(loaded.names if loaded else {}), **names})
                continue
            # a name in a module of the project, or a module in a package of it, or of another package
            found = loaded.names.get(alias.name) if loaded else None
            if found is None and inner and self._load(inner):
                found = Value("module", full, inner, cls=self._load(inner))
            if found is None:
                self.externals.add(full)
                found = self._make("module", node, label=full, key=bool(path))
            names[alias.asname or alias.name] = found

    def _import(self, wanted: str, full: str, level: int, node: Any) -> Value:
        path = self.project.find(wanted, level, self._path())
        module = self._load(path) if path else None
        if module is not None and wanted == full:
            return Value("module", full, path, cls=module)
        if module is not None:  # `import a.b` binds a
            return Value("module", full, path, key=True)
        self.externals.add(wanted)
        return Value("module", full, self._path(), node.lineno)

    def _load(self, path: str) -> Module | None:
        """Return a module of the project, whose statements have been walked over."""
        if path in self.imported:
            return self.imported[path]
        source = self.project.read(path)
        if source is None:
            return None
        module = Module(source)
        self.imported[path] = module
        # the statements of a module run once, at its import: they are not events of the training
        self._muted += 1
        loops, self._loops = self._loops, []
        conditions, self._conditions = self._conditions, []
        try:
            self._run_module(module, main=False)
        finally:
            self._muted -= 1
            self._loops = loops
            self._conditions = conditions
        return module
