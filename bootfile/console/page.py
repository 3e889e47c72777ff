"""Fill the template of a page: one file that loads nothing and runs no script."""

import os
from typing import Any

from bootfile.ground.errors import import_optional

jinja2 = import_optional("jinja2", "the page needs jinja2")


def render(template: str, **values: Any) -> str:
    """Return the text of a template. A value that is missing is an error.

    template: the path of a file, which may extend base.html of this folder.
    """
    folders = [os.path.dirname(template), os.path.dirname(os.path.abspath(__file__))]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folders),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text: str = environment.get_template(os.path.basename(template)).render(values)
    return text
