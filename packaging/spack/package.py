# For Spack 1.0 and newer, as repos/spack_repo/builtin/packages/py_pydtnn/package.py of its packages: see
# packaging/README.md, also for how it was checked.

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyPydtnn(PythonPackage):
    """Distributed training of neural networks in Python, readable and fast."""

    homepage = "@REPOSITORY@"
    url = "@SDIST_URL@"

    license("BSD-3-Clause")

    version("0.1.0", sha256="@SDIST_SHA256@")

    variant("data", default=True, description="More data sets, images and downloads")
    variant("plot", default=False, description="Figures")
    variant("report", default=False, description="Pages about runs")
    variant("onnx", default=False, description="ONNX files")

    depends_on("c", type="build")

    depends_on("python@3.11:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")
    depends_on("py-cython@3.1:", type="build")

    depends_on("py-numpy@2:", type=("build", "link", "run"))
    depends_on("py-ml-dtypes@0.5:", type="run")
    depends_on("py-mpi4py@4.1:", type="run")
    depends_on("py-threadpoolctl@3.5:", type="run")
    depends_on("py-pyyaml@6:", type="run")
    depends_on("py-rich@13:", type="run")

    with when("+data"):
        depends_on("py-scikit-learn@1.5:", type="run")
        depends_on("py-pooch@1.8:", type="run")
        depends_on("py-pillow@10:", type="run")
    depends_on("py-matplotlib@3.9:", when="+plot", type="run")
    depends_on("py-jinja2@3.1:", when="+report", type="run")
    depends_on("py-onnx@1.17:", when="+onnx", type="run")

    import_modules = ["pydtnn", "pydtnn.models"]

    def setup_build_environment(self, env):
        env.set("PYDTNN_BUILD", "all float64 bfloat16")  # for all nodes of a cluster
