"""Lets torch for CUDA, as the package index has it, be imported without CUDA's libraries, which are 3 GB.

python tests/cuda_stand_ins.py FOLDER    the folder `lib` of an installed torch

On CPUs torch calls nothing of them but a few functions of libcudart, which is small and has to be there (the package
nvidia-cuda-runtime). The linker wants the others as well, with the versions of their symbols, or torch is not imported.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

_OF_CUDA = re.compile(r"lib(cu|nv|nccl)")
_FUNCTION = re.compile(r"(cu[a-z]*|nccl|nvshmem|nvrtc|nvJitLink)[A-Z_]")
_TOO_OLD = 35  # cudaErrorInsufficientDriver


def write_stand_ins(folder: Path) -> list[str]:
    """Writes them beside torch's libraries, which look there first; gives their names."""
    libraries = sorted(folder.glob("*.so*"))
    listed = [_printed("readelf", "-dVW", library) for library in libraries]
    needed = {name for text in listed for name in re.findall(r"NEEDED.*\[(.*?)\]", text)}
    there = {file.name for file in [*libraries, *folder.parent.parent.glob("nvidia/*/lib/*.so*")]}
    missing = sorted(filter(_OF_CUDA.match, needed - there))
    versions = defaultdict[str, set[str]](set)
    for text in listed:
        for name, entries in re.findall(r"File: (\S+).*\n((?:.*Name: .*\n)+)", text):
            versions[name].update(re.findall(r"Name: (\S+)", entries))
    functions = _undefined(libraries)
    for name in missing:
        _link(folder / name, {version: functions.pop(version, set()) for version in ["", *sorted(versions[name])]})
    return missing


def _undefined(libraries: list[Path]) -> dict[str, set[str]]:
    """The functions of CUDA that the libraries call, by the version of their symbols, if they have any."""
    found = defaultdict[str, set[str]](set)
    for library in libraries:
        for line in _printed("nm", "-D", "--undefined-only", "--with-symbol-versions", library).splitlines():
            name, _, version = line.split()[-1].partition("@")
            if version or _FUNCTION.match(name):
                found[version].add(name)
    return found


def _link(file: Path, functions: dict[str, set[str]]) -> None:
    code = "".join(f"int {name}(void) {{ return {_TOO_OLD}; }}\n" for names in functions.values() for name in names)
    versioned = {version: "; ".join(names) for version, names in functions.items() if version}
    script = "".join(f"{version} {{ global: {names}; }};\n" for version, names in versioned.items())
    source, versions = file.with_suffix(".c"), file.with_suffix(".map")
    source.write_text(code)
    versions.write_text(script)
    options = [f"-Wl,--version-script={versions}"] if script else []
    command = ["gcc", "-shared", "-fPIC", "-nostdlib", "-w", "-o", file, f"-Wl,-soname,{file.name}", *options, source]
    subprocess.run(command, check=True)
    source.unlink()
    versions.unlink()


def _printed(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    print("stand-ins for", *write_stand_ins(Path(sys.argv[1])))
