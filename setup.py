"""What pyproject.toml cannot say: the one compiled module. Where there is no compiler it is left out, and traces open
as before, only slower.
"""

from setuptools import Extension, setup

SCAN = Extension(
    "fsdpviz.trace.kineto.scan",
    ["fsdpviz/trace/kineto/scan.pyx"],
    depends=["fsdpviz/trace/kineto/json_text.pxd"],
    optional=True,
)

setup(ext_modules=[SCAN])
