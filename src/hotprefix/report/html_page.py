"""The pages of all reports. Owns: how a template becomes HTML.

Rules: what a page shows is escaped, except `Markup`. A value that a template asks for and does not get is an
error.
"""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined


def render_page(template: str, **values: object) -> str:
    """The file `template` of `report/templates` with the values that it names."""
    environment = Environment(
        loader=PackageLoader("hotprefix.report"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template(template).render(**values)
