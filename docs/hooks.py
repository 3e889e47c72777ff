"""Build the site from the pages where they are, for `make docs`: mkdocs calls the functions of this module.

docs/ has only what no other reader needs. All other pages are those of the repository, in their folders, so
that a link is the same here and there. A source file or a folder to which a page links becomes a page, too.
A page NAME.zh-CN.md is the Chinese one of NAME.md: each has a switch to the other.
"""

import os
import re

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_FOLDERS = (
    "",
    "guides",
    "jobs",
    "bootfile",
    "common",
    "datasets",
    "launch",
    "tests",
    "tests/benchmarks",
    "tests/lint",
    "tests/zoo",
)
_NOT_FOR_USERS = ("CHANGELOG.md", "CONTRIBUTING.md", "AGENTS.md", "tests/")  # found last
_CHINESE = ".zh-CN.md"
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")
_CODE = re.compile(r"(^ *```.*?^ *```|`[^`\n]*`)", re.DOTALL | re.MULTILINE)
# Python-Markdown wants an empty line before a list and before indented code; the pages leave it out.
_BLOCK = re.compile(r"^((?![-*|\s]|\d+\. )[^\n]+\n)(?=[-*] |\d+\. | {4}\S)", re.MULTILINE)
_LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".yaml": "yaml", ".ipynb": "json"}
_LONGEST = 400  # lines of a file that are shown


def on_config(config: MkDocsConfig) -> None:
    """Show the version at the foot of each page: it is read from the package, which is not imported."""
    with open(os.path.join(_ROOT, "bootfile", "__init__.py"), encoding="utf-8") as file:
        version = re.search(r'__version__ = "(.+)"', file.read())
    config.copyright = f"Bootfile {version[1] if version else ''}"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the repository, and what they link to."""
    pages = {}
    for folder in _FOLDERS:
        for name in sorted(os.listdir(os.path.join(_ROOT, folder))):
            if name.endswith(".md"):
                pages[os.path.join(folder, name)] = os.path.join(_ROOT, folder, name)
    linked = set()
    for path, source in pages.items():
        files.append(File.generated(config, path, abs_src_path=source))
        with open(source, encoding="utf-8") as file:
            linked |= {_find(path, link) for link in _LINK.findall(_CODE.sub("", file.read()))}
    for path in sorted(linked - pages.keys()):
        source = os.path.join(_ROOT, path)
        if path.endswith(".png"):
            files.append(File.generated(config, path, abs_src_path=source))
        elif os.path.exists(source):  # what is missing is a broken link, which mkdocs names
            shown = File.generated(config, f"{path}.source.md", content=_show(path, source))
            shown.inclusion = InclusionLevel.NOT_IN_NAV
            files.append(shown)
    return files


def _find(page: str, link: str) -> str:
    """Return the path, in the repository, of a page's link."""
    return os.path.normpath(os.path.join(os.path.dirname(page), link))


def _show(path: str, source: str) -> str:
    """Return the page that shows a file, or lists a folder. The search does not look into it."""
    head = f"---\nsearch: {{exclude: true}}\n---\n# {path}\n\n"
    if os.path.isdir(source):
        names = sorted(name for name in os.listdir(source) if not name.startswith(("_", ".")))
        return head + "".join(f"- `{name}`\n" for name in names)
    with open(source, encoding="utf-8") as file:
        lines = file.read().splitlines()
    if len(lines) > _LONGEST:
        lines = [*lines[:_LONGEST], f"... {len(lines) - _LONGEST} more lines"]
    language = _LANGUAGES.get(os.path.splitext(path)[1], "text")
    return head + "\n".join([f"~~~~{language}", *lines, "~~~~"]) + "\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let the links to source files lead to their pages. mkdocs calls it before it renders a page."""
    if page.file.src_uri.startswith(_NOT_FOR_USERS):
        page.meta["search"] = {"boost": 0.01}

    def lead(match: re.Match[str]) -> str:
        path = f"{_find(page.file.src_uri, match[1])}.source.md"
        return match[1].rstrip("/") + ".source.md" if path in files.src_uris else match[1]

    # the even parts are text, the odd ones code, which stays as it is
    parts = _CODE.split(markdown)
    parts[::2] = [_BLOCK.sub(r"\1\n", _LINK.sub(lead, part)) for part in parts[::2]]
    return "".join(parts)


def on_page_context(context: dict, page: Page, config: MkDocsConfig, nav: object) -> dict:
    """Offer each page in both languages, and label it with its own. mkdocs calls it before the template."""
    path = page.file.src_uri
    is_chinese = path.endswith(_CHINESE)
    english = path.removesuffix(_CHINESE) + ".md" if is_chinese else path
    chinese = english.removesuffix(".md") + _CHINESE
    uris = config.extra["uris"]
    config.extra["alternate"] = [
        {"name": "English", "lang": "en", "link": uris.get(english, uris["README.md"])},
        {"name": "中文", "lang": "zh", "link": uris.get(chinese, uris["README.zh-CN.md"])},
    ]
    config.theme["language"] = "zh" if is_chinese else "en"
    return context


def on_nav(nav: object, config: MkDocsConfig, files: Files) -> None:
    """Note the addresses of the pages, which on_page_context() needs."""
    config.extra["uris"] = {file.src_uri: file.url for file in files.documentation_pages()}


class Arguments(griffe.Extension):
    """Shows the lines `name: meaning` of a docstring as a list, as Markdown has it."""

    def on_instance(self, *, obj: griffe.Object, **_: object) -> None:
        """Change the docstring of an object: griffe calls it for each that it reads."""
        if obj.docstring:
            obj.docstring.value = re.sub(
                r"(?m)^([a-z_]\w*(?:, [a-z_]\w*)*): ", r"\n- `\1`: ", obj.docstring.value
            )
