"""Stand-ins for CANN's libraries, so that the official torch_npu wheel can be imported without CANN.

The wheel's own libraries name six others and some hundred functions that come with CANN. Both lists are read from
the wheel with binutils; a C compiler makes one library that has all functions, each answering with an error, and
empty ones for the other names. That is enough for schemas and meta kernels, which run no device code.
"""

import ctypes
import importlib.util
import subprocess
import sys
import sysconfig
from pathlib import Path

_ANSWERS = {
    "aclrtGetDeviceCount": "int aclrtGetDeviceCount(unsigned *count) { if (count) *count = 0; return 0; }",
    "aclrtGetSocName": "const char *aclrtGetSocName(void) { return 0; }",
    "aclGetRecentErrMsg": 'const char *aclGetRecentErrMsg(void) { return "a stand-in, not CANN"; }',
}
_WELL = ("_Z", "Msprof", "aclInit", "aclFinalize", "aclmdl", "aclAppLog")  # called at import: 0, success
_FAILURE = 507000  # any code that isn't success


def load(folder: Path) -> list[str]:
    """Builds the stand-ins in ``folder`` and loads them for this process; the names of the libraries."""
    wheel = _folder_of("torch_npu")
    ours = [*wheel.glob("_C*.so"), *wheel.glob("lib/*.so*")]
    known = [*ours, *_folder_of("torch").glob("lib/*.so*"), *wheel.parent.glob("torch_npu.libs/*.so*")]
    names = {path.name for path in known}
    needed = sorted({name for path in ours for name in _needed(path)} - names)
    system = [path for name in needed if (path := _system_library(name)) is not None]
    absent = [name for name in needed if _system_library(name) is None]
    if not absent:
        return []
    interpreter = [Path(sys.executable).resolve(), *Path(sysconfig.get_config_var("LIBDIR")).glob("libpython3*.so*")]
    defined = {name for path in [*known, *system, *interpreter] for name, _ in _symbols(path, "--defined-only")}
    wanted = {name for path in ours for name, kind in _symbols(path, "--undefined-only") if kind not in "wv"}
    lines = [_function(name) for name in sorted(wanted - defined)]
    for number, name in enumerate(absent):
        source = folder / f"{name}.c"
        source.write_text("\n".join(lines if number == 0 else []) + "\n")
        _run("gcc", "-w", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(folder / name), str(source))
        ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
    return absent


def _function(name: str) -> str:
    if name in _ANSWERS:
        return _ANSWERS[name]
    return f"long {name}(void) {{ return {0 if name.startswith(_WELL) else _FAILURE}; }}"


def _folder_of(package: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise SystemExit(f"{package} isn't installed here; to mend: make npu-contract")
    return Path(found.submodule_search_locations[0])


def _needed(path: Path) -> list[str]:
    lines = _run("readelf", "-d", str(path)).splitlines()
    return [line.split("[")[1].rstrip("]") for line in lines if "(NEEDED)" in line]


def _system_library(name: str) -> Path | None:
    for line in _run("ldconfig", "-p").splitlines():
        if line.split("(")[0].strip() == name:
            return Path(line.split("=>")[1].strip())
    return None


def _symbols(path: Path, which: str) -> list[tuple[str, str]]:
    """``(name, kind)`` as nm lists them; kinds w and v are weak."""
    rows = (line.split() for line in _run("nm", "-D", which, str(path)).splitlines())
    return [(row[-1].split("@")[0], row[-2]) for row in rows if len(row) >= 2]


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
