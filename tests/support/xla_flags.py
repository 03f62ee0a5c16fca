"""XLA's flags for tests and for the processes that they start."""

from importlib.metadata import version


def fast_compilation(devices: int | None = None) -> str:
    """Returns flags with which XLA compiles tiny programs sooner, for a number of CPU devices.

    Such programs take longer to compile than to run. So LLVM neither optimizes them nor compiles
    each in many parts. Before jax 0.11, XLA also has an older way to compile fusions, which takes
    half as long. CI runs the quick tests of kernels, meshes and loops with the newest jax, too,
    which has only the newer way.
    """
    flags = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
    if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):
        flags.append("--xla_cpu_use_fusion_emitters=false")
    if devices is not None:
        flags.append(f"--xla_force_host_platform_device_count={devices}")
    return " ".join(flags)
