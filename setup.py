"""The part of the package's metadata that pyproject.toml cannot compute: URLs, from the constant in
surgery/core/project.py.
"""

import runpy
from pathlib import Path

from setuptools import setup

project = runpy.run_path(str(Path(__file__).resolve().parent / "surgery" / "core" / "project.py"))
setup(project_urls=project["project_urls"]())
