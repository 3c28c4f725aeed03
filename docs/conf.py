"""Sphinx's configuration; `make docs` builds build/docs."""

import ppe_ddp

project = "ppe_ddp"
author = "The ppe_ddp authors"
copyright = author
version = release = ppe_ddp.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "ppe_ddp"
default_role = "code"  # what docstrings have in single backquotes
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["pictures.css"]
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist"]
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_use_ivar = True
