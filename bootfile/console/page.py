"""Fill the template of a page: one file that loads nothing and runs no script."""

import os
from typing import Any

from bootfile.ground.errors import import_optional

jinja2 = import_optional("jinja2", "the page needs jinja2")


def render(template: str, **values: Any) -> str:
    """Return the text of a template, a path below this folder. A value that is missing is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(os.path.dirname(os.path.abspath(__file__))),
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template(template).render(values)
