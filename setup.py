"""Builds the optional C++ kernels and packages profiles/ and csrc/*.cu. See also pyproject.toml.

Without a working compiler the package still installs; it then runs on the reference kernels.
"""

from __future__ import annotations

import platform
import shutil
import zlib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError

COMMON_FLAGS = [
    "-O3",
    "-g0",
    "-std=c++17",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-exceptions",
    "-fno-rtti",
    "-fvisibility=hidden",
    "-pthread",
    "-Wno-psabi",
    *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),  # false alarms in GCC 12's headers
]
AVX512_FLAGS = [
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"),
    *("-mfma", "-mf16c", "-mprefer-vector-width=512"),
]
AMX_FLAGS = ["-mamx-tile", "-mamx-bf16", "-mprfchw"]
X86_FLAGS = {
    "csrc/kernels_avx2.cpp": ["-mavx2", "-mfma", "-mf16c"],
    "csrc/kernels_avx512.cpp": AVX512_FLAGS,
    "csrc/kernels_avx512_vnni.cpp": [*AVX512_FLAGS, "-mavx512vnni"],
    "csrc/kernels_avx512_bf16.cpp": [*AVX512_FLAGS, "-mavx512vnni", "-mavx512bf16"],
    "csrc/kernels_avx512_amx.cpp": [*AVX512_FLAGS, "-mavx512vnni", "-mavx512bf16", *AMX_FLAGS],
    "csrc/kernels_amx_emulated.cpp": ["-mno-avx"],  # whatever CXXFLAGS has
}
# Only for tests: with -O3 it would take minutes to compile, since each instruction is a function.
EMULATED_FLAGS = {"csrc/kernels_amx_emulated.cpp": ["-Og"]}
HEADERS = sorted(str(path) for path in Path("csrc").glob("*.h"))


def sources_digest() -> str:
    """As in bros/kernels/dispatch.py, which compares the two."""
    digest = 0
    for path in sorted([*Path("csrc").glob("*.cpp"), *Path("csrc").glob("*.h")]):
        digest = zlib.crc32(path.read_bytes(), digest)
    return f"{digest:08x}"


class BuildKernels(build_ext):
    """Compiles each source with the flags of its instruction set; Extension allows only one set."""

    def run(self) -> None:
        # Compiling may fail, because the extension is optional. An older one must not stay in its
        # place then: neither beside the package (inplace) nor where packages are collected.
        for ext in self.extensions:
            names = self.get_ext_fullpath(ext.name), self.get_ext_filename(ext.name)
            for path in (Path(names[0]), Path(self.build_lib, names[1])):
                path.unlink(missing_ok=True)
        super().run()

    def build_extension(self, ext: Extension) -> None:
        objects = []
        digest = sources_digest()
        for source in ext.sources:
            flags = COMMON_FLAGS + EMULATED_FLAGS.get(source, [])
            if platform.machine().lower() in ("x86_64", "amd64"):
                flags = flags + self.known(X86_FLAGS.get(source, []))
            objects += self.compiler.compile(
                [source],
                output_dir=self.build_temp,
                macros=[("BROS_SOURCES", f'"{digest}"')],
                include_dirs=ext.include_dirs,
                extra_postargs=flags,
                depends=ext.depends,
            )
        self.link(ext, objects)

    def known(self, flags: list[str]) -> list[str]:
        """These flags, or none if they have those of AMX and the compiler or assembler does not
        know it (GCC before 11): the object then is empty."""
        if not set(AMX_FLAGS) <= set(flags):
            return flags
        probe = Path(self.build_temp, "probe_amx.cpp")
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.write_text('void probe() { __asm__ volatile("tilerelease"); }\n')
        try:
            self.compiler.compile([str(probe)], output_dir=str(probe.parent), extra_postargs=flags)
        except CompileError:
            return []
        return flags

    def link(self, ext: Extension, objects: list[str]) -> None:
        self.compiler.link_shared_object(
            objects,
            self.get_ext_fullpath(ext.name),
            extra_postargs=["-pthread"],
            build_temp=self.build_temp,
            target_lang="c++",
        )


class BuildPackage(build_py):
    """Copies files that bros reads at run time into the package, for use without a source tree."""

    def run(self) -> None:
        # What an earlier build has left may be gone from the sources by now, and would be packed.
        elsewhere = Path(self.build_lib).resolve() != Path.cwd()  # not the sources themselves
        has_run = self.distribution.have_run.get("build_ext")
        if not self.editable_mode and not has_run and elsewhere:
            shutil.rmtree(Path(self.build_lib, "bros"), ignore_errors=True)
        super().run()
        if self.editable_mode:
            return
        for path in sorted(Path("profiles").glob("*/*.json")):
            folder = Path(self.build_lib, "bros", "_profiles", path.parent.name)
            self.mkpath(str(folder))
            self.copy_file(str(path), str(folder / path.name))
        sources = Path(self.build_lib, "bros", "kernels", "_cuda")
        self.mkpath(str(sources))
        for path in sorted(Path("csrc").glob("*.cu")):  # compiled at first use
            self.copy_file(str(path), str(sources / path.name))


setup(
    ext_modules=[
        Extension(
            "bros.kernels._C",
            sources=[
                "csrc/module.cpp",
                "csrc/team.cpp",
                "csrc/kernels_generic.cpp",
                "csrc/kernels_avx2.cpp",
                "csrc/kernels_avx512.cpp",
                "csrc/kernels_avx512_vnni.cpp",
                "csrc/kernels_avx512_bf16.cpp",
                "csrc/kernels_avx512_amx.cpp",
                "csrc/kernels_amx_emulated.cpp",
            ],
            depends=HEADERS,
            language="c++",
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels, "build_py": BuildPackage},
)
